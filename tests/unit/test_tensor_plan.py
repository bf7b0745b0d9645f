# SPDX-License-Identifier: Apache-2.0
"""Which layers tensor parallelism splits: only those where it is clear, and what a plan by hand may say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rankwise.errors import ConfigurationError
from rankwise.parallel.tensor.plan import check_tied, find_plan, given_plan

WIDTH = 12


class Heads(nn.Module):
    """Attention as its subclasses read it."""

    def __init__(self, heads: int = 4, kv_heads: int = 4, **attributes: int) -> None:
        super().__init__()
        size = WIDTH // heads
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, kv_heads * size)
        self.v_proj = nn.Linear(WIDTH, kv_heads * size)
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        for name, value in attributes.items():
            setattr(self, name, value)


class BySize(Heads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, _, _ = (one(x).view(shape) for one in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(q.reshape(*x.shape[:-1], -1))


class ByCount(Heads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.num_heads, -1)
        self.k_proj(x).view(b, t, self.num_kv_heads, -1)
        return self.o_proj(q.reshape(b, t, -1))


class ByWidth(Heads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        return self.o_proj(self.q_proj(x).view(b, t, self.num_heads, c // self.num_heads).reshape(b, t, c))


class ByOwnWidth(Heads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.q_proj(x).view(-1, self.num_heads, 3).reshape(-1, self.embed_dim))


class WithNorm(BySize):
    def __init__(self, **attributes: int) -> None:
        super().__init__(**attributes)
        self.q_norm = nn.LayerNorm(3)


def pair(first: str = "up", last: str = "down", hidden: int = 8, **others: nn.Module) -> nn.Module:
    return nn.ModuleDict({first: nn.Linear(WIDTH, hidden), last: nn.Linear(hidden, WIDTH), **others})


def words(size: int = 20, **options: Any) -> nn.Module:
    return nn.ModuleDict({"emb": nn.Embedding(size, WIDTH, **options), "lm_head": nn.Linear(WIDTH, size)})


FOUND = {
    "pair": (pair(), {"up": "column", "down": "row"}),
    "gated": (
        nn.ModuleDict({"m": pair("up_proj", "down_proj", gate_proj=nn.Linear(WIDTH, 8), act_fn=nn.SiLU())}),
        {"m.gate_proj": "column", "m.up_proj": "column", "m.down_proj": "row"},
    ),
    "sequential": (
        nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 6), nn.Linear(6, 3)),
        {"0": "column", "3": "row"},
    ),
    "a Linear after a pair": (
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)),
        {"0": "column", "1": "row"},
    ),
    "words": (words(21), {"lm_head": "head", "emb": "vocab"}),
    "encoder": (nn.TransformerEncoderLayer(WIDTH, 3, 8), {"linear1": "column", "linear2": "row"}),
    "heads by size": (BySize(head_dim=3), dict.fromkeys(["q_proj", "k_proj", "v_proj"], "column") | {"o_proj": "row"}),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_clear_is_split(name: str) -> None:
    model, styles = FOUND[name]
    assert find_plan(model, 2).styles == styles


def test_attributes_that_count_heads_are_adapted() -> None:
    plan = find_plan(ByCount(4, 2, num_heads=4, num_kv_heads=2), 2)
    assert plan.heads == {"": {"num_heads": 2, "num_kv_heads": 1}}
    assert set(plan.styles.values()) == {"column", "row"}


WHOLE = {
    "width of the input": (ByWidth(num_heads=4), "uses the width c of its input"),
    "width of its own": (ByOwnWidth(num_heads=4, embed_dim=WIDTH), "uses self.embed_dim (12)"),
    "nothing said": (BySize(), "neither how many heads"),
    "a norm of heads": (WithNorm(head_dim=3), "its q_norm may work on heads"),
    "packed": (nn.MultiheadAttention(WIDTH, 3), "packs its three projections"),
    "a norm inside": (pair(norm=nn.LayerNorm(8)), "its norm may work on what lies between"),
    "a softmax inside": (pair(softmax=nn.Softmax(-1)), "its softmax may work on what lies between"),
    "a gate in a Sequential": (nn.Sequential(nn.Linear(4, 8), nn.GLU(), nn.Linear(4, 4)), None),
    "an uneven pair": (pair(hidden=7), "7 inputs cannot be shared by 2 ranks evenly"),
    "words with a greatest norm": (words(max_norm=1.0), "max_norm"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_not_clear_stays_whole_and_is_named(name: str) -> None:
    model, why = WHOLE[name]
    model = nn.ModuleDict({"inner": model, "sure": pair()})
    plan = find_plan(model, 2)
    assert {key for key in plan.styles if not key.startswith("sure")} == set()
    assert why is None or why in str(plan)


def test_llama_is_recognised_as_a_whole() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=22, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    plan = find_plan(model, 2)
    assert len(plan.styles) == 9
    assert plan.whole == {}
    assert plan.heads == {}
    with pytest.raises(ConfigurationError, match="has 2 heads of keys and values, which 4 ranks cannot share evenly"):
        find_plan(model, 4)


def test_nothing_to_split_is_an_error_that_says_what_was_seen() -> None:
    with pytest.raises(ConfigurationError, match="recognises no layer of MultiheadAttention"):
        find_plan(nn.MultiheadAttention(WIDTH, 3), 2)


def test_a_plan_by_hand_names_modules_with_wildcards() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([pair(), pair()])})
    plan = given_plan(model, {"layers.*.up": "column", "layers.*.down": "row", "layers.1.up": "replicate"}, 2)
    assert plan.styles == {"layers.0.up": "column", "layers.0.down": "row", "layers.1.down": "row"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layer.0.up": "column"}, "(?s)names 'layer.0.up'.*near it: .*layers.0.up"),
        ({"layers.*.up": "col"}, "(?s)as 'col', which is no style.*\"row\""),
        ({"layers.0": "column"}, "is a ModuleDict, not a Linear"),
        ({"layers.0.up": "vocab"}, "is a Linear, not a Embedding"),
        ({"layers.0.up": "column"}, "has 9 outputs, which 2 ranks cannot share evenly"),
    ],
)
def test_a_plan_by_hand_that_does_not_fit_is_refused(given: dict[str, Any], message: str) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([pair(hidden=9)])})
    with pytest.raises(ConfigurationError, match=message):
        given_plan(model, given, 2)


def test_tied_layers_must_be_split_alike() -> None:
    model = words()
    model["lm_head"].weight = model["emb"].weight
    check_tied(model, find_plan(model, 2))
    with pytest.raises(ConfigurationError, match="share a parameter, and the plan splits them differently"):
        check_tied(model, given_plan(model, {"emb": "vocab"}, 2))
