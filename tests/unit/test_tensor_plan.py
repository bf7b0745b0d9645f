# SPDX-License-Identifier: Apache-2.0
"""Which layers tensor parallelism splits: only those where it is clear, and what a plan by hand may say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, normalize, relu, silu

from rankwise.errors import ConfigurationError
from rankwise.tensor_parallel.plan import check_tied, find_plan, given_plan

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

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        """Return what every head has of its query, key and value."""
        return self.q_proj(x) + self.k_proj(x) * self.v_proj(x)


class BySize(Heads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.mixed(x).view(*x.shape[:-1], -1, self.head_dim).softmax(-1).flatten(-2))


class SaysNothing(Heads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.mixed(x).view(*x.shape[:-1], -1, 3).softmax(-1).flatten(-2))


class ByCount(Heads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.num_heads, -1)
        k, v = (one(x).view(b, t, self.num_kv_heads, -1) for one in (self.k_proj, self.v_proj))
        k, v = (one.repeat_interleave(self.num_heads // self.num_kv_heads, 2) for one in (k, v))
        return self.o_proj((q * k.softmax(-1) + v).reshape(b, t, -1))


class ByWidth(Heads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        return self.o_proj(self.mixed(x).view(b, t, self.num_heads, c // self.num_heads).reshape(b, t, c))


class ByOwnWidth(Heads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.mixed(x).view(-1, self.num_heads, 3).reshape(-1, self.embed_dim))


class WithNorm(BySize):
    def __init__(self, **attributes: int) -> None:
        super().__init__(**attributes)
        self.q_norm = nn.LayerNorm(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q_norm(self.mixed(x).view(*x.shape[:-1], -1, self.head_dim))
        return self.o_proj(q.flatten(-2))


class Pair(nn.Module):
    """An MLP as its subclasses calculate it."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.act = nn.SiLU()
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = dropout(self.act(self.up(x)), 0.1, self.training)
        if x.dtype != self.down.weight.dtype:
            h = h.to(self.down.weight.dtype)
        return x + self.down(h * self.scale)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def chunk(my, x: torch.Tensor) -> torch.Tensor:  # noqa: N805
        return my.w2(torch.nn.functional.silu(my.w1(x)) * my.w3(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.chunk(one) for one in x.split(1)])


class Holder(nn.Module):
    """Calls the layers of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(WIDTH, 8), "fc2": nn.Linear(8, WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp["fc2"](self.mlp["fc1"](x).relu())


class SoftmaxInside(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).softmax(-1))


class FunctionInside(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(normalize(silu(self.up(x)), dim=-1))


class GivesFeatures(Pair):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = relu(self.up(x))
        return {"out": self.down(h), "features": h}


class Remembers(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.up(x)
        return self.down(self.hidden)


class OtherWay(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(relu(self.down(x)))


class Sometimes(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        if self.training:
            h = self.up(x)
        return self.down(h)


class ReadsWeight(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)) + x @ self.down.weight @ self.up.weight


class AnotherActivation(Pair):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.act = act


class Adapted(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x.mean()


class AdaptedPair(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.up = Adapted(WIDTH, 8)


class Slopes(Heads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.mixed(x).view(*x.shape[:-1], self.num_heads, -1)
        slopes = torch.tensor([2.0**-i for i in range(self.num_heads)])
        return self.o_proj((q * slopes[:, None]).flatten(-2))


class ScaledBefore(Heads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.mixed(x)
        q = q / q.shape[-1] ** 0.5
        return self.o_proj(q.view(*x.shape[:-1], -1, self.head_dim).flatten(-2))


class ScaledAfter(Heads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.mixed(x).view(*x.shape[:-1], -1, self.head_dim)
        return self.o_proj((q / q.size(-1) ** 0.5).softmax(dim=-1).flatten(-2))


class MeanOfHeads(Heads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.mixed(x).view(*x.shape[:-1], -1, self.head_dim)
        return self.o_proj(q.flatten(-2)) * q.mean((-1, -2)).unsqueeze(-1)


class SoftmaxOfHeads(Heads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.mixed(x).view(*x.shape[:-1], -1, self.head_dim).softmax(-2).flatten(-2))


def words(size: int = 20, **options: Any) -> nn.Module:
    return nn.ModuleDict({"emb": nn.Embedding(size, WIDTH, **options), "lm_head": nn.Linear(WIDTH, size)})


def words_and_tied_norms() -> nn.Module:
    norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
    norms[1].weight = norms[0].weight
    return nn.ModuleDict({"words": words(), "norms": norms})


FOUND = {
    "pair": (Pair(), {"up": "column", "down": "row"}),
    "gated": (nn.ModuleDict({"m": Gated()}), {"m.w1": "column", "m.w3": "column", "m.w2": "row"}),
    "a dict of layers": (nn.Sequential(Holder()), {"0.mlp.fc1": "column", "0.mlp.fc2": "row"}),
    "an activation of several": (
        AnotherActivation(nn.Sequential(nn.GELU(), nn.Dropout())),
        {"up": "column", "down": "row"},
    ),
    "heads scaled by their size": (
        ScaledAfter(head_dim=3),
        dict.fromkeys(["q_proj", "k_proj", "v_proj"], "column") | {"o_proj": "row"},
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
    "words, and other layers that are tied": (
        words_and_tied_norms(),
        {"words.lm_head": "head", "words.emb": "vocab"},
    ),
    "encoder": (nn.TransformerEncoderLayer(WIDTH, 3, 8), {"linear1": "column", "linear2": "row"}),
    "layers named the other way": (OtherWay(), {"down": "column", "up": "row"}),
    "heads by size": (BySize(head_dim=3), dict.fromkeys(["q_proj", "k_proj", "v_proj"], "column") | {"o_proj": "row"}),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_clear_module_is_split(name: str) -> None:
    model, styles = FOUND[name]
    assert find_plan(model, 2).styles == styles


def test_attributes_that_count_heads_are_adapted() -> None:
    plan = find_plan(ByCount(4, 2, num_heads=4, num_kv_heads=2), 2)
    assert plan.heads == {"": {"num_heads": 2, "num_kv_heads": 1}}
    assert set(plan.styles.values()) == {"column", "row"}


WHOLE = {
    "width of the input": (ByWidth(num_heads=4), "does not run on a part"),
    "width of its own": (ByOwnWidth(num_heads=4, embed_dim=WIDTH), "does not run on a part"),
    "nothing said": (SaysNothing(), "neither how many heads"),
    "a norm of heads": (WithNorm(head_dim=3), "another gradient of its q_norm.weight"),
    "packed": (nn.MultiheadAttention(WIDTH, 3), "packs its three projections"),
    "a softmax inside": (SoftmaxInside(), "the parts of down do not add up"),
    "a softmax for activation": (AnotherActivation(nn.Softmax(-1)), "the parts of down do not add up"),
    "a norm for activation": (AnotherActivation(nn.LayerNorm(8)), "does not run on a part"),
    "a function inside": (FunctionInside(), "the parts of down do not add up"),
    "features given out": (GivesFeatures(), "returns or keeps what lies between"),
    "features kept": (Remembers(), "keeps what lies between"),
    "a layer left out at times": (Sometimes(), "its code does not call up"),
    "a weight that is read": (ReadsWeight(), "uses the weight of a layer itself"),
    "layers of another kind": (AdaptedPair(), "do more than nn.Linear"),
    "nobody calls them": (
        nn.ModuleDict({"up": nn.Linear(4, 4), "down": nn.Linear(4, 4)}),
        None,
    ),
    "a number per head": (Slopes(num_heads=4), "the parts of o_proj do not add up"),
    "the width of what is split": (ScaledBefore(head_dim=3), "the parts of o_proj do not add up"),
    "a mean over heads": (MeanOfHeads(head_dim=3), "returns or keeps what lies between"),
    "a softmax over heads": (SoftmaxOfHeads(head_dim=3), "the parts of o_proj do not add up"),
    "a gate in a Sequential": (nn.Sequential(nn.Linear(4, 8), nn.GLU(), nn.Linear(4, 4)), None),
    "an uneven pair": (Pair(hidden=7), "7 inputs cannot be shared by 2 ranks evenly"),
    "words with a greatest norm": (words(max_norm=1.0), "max_norm"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_an_unclear_module_stays_whole_and_is_named(name: str) -> None:
    model, why = WHOLE[name]
    model = nn.ModuleDict({"inner": model, "sure": Pair()})
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
    with pytest.raises(
        ConfigurationError, match="has 2 heads of keys and values, which cannot be divided evenly among 4 ranks"
    ):
        find_plan(model, 4)


def test_nothing_to_split_is_an_error_that_says_what_was_seen() -> None:
    with pytest.raises(ConfigurationError, match="recognises no layer of MultiheadAttention"):
        find_plan(nn.MultiheadAttention(WIDTH, 3), 2)


def test_a_plan_by_hand_names_modules_with_wildcards() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([Pair(), Pair()])})
    plan = given_plan(model, {"layers.*.up": "column", "layers.*.down": "row", "layers.1.up": "replicate"}, 2)
    assert plan.styles == {"layers.0.up": "column", "layers.0.down": "row", "layers.1.down": "row"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layer.0.up": "column"}, "(?s)names 'layer.0.up'.*near it: .*layers.0.up"),
        ({"layers.*.up": "col"}, "(?s)Unknown style 'col' of .*\"row\""),
        ({"layers.0": "column"}, "requires a Linear, not a Pair"),
        ({"layers.0.up": "vocab"}, "requires a Embedding, not a Linear"),
        ({"layers.0.up": "column"}, "has 9 outputs, which cannot be divided evenly among 2 ranks"),
    ],
)
def test_a_plan_by_hand_that_does_not_fit_is_refused(given: dict[str, Any], message: str) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([Pair(hidden=9)])})
    with pytest.raises(ConfigurationError, match=message):
        given_plan(model, given, 2)


def test_tied_layers_must_be_split_alike() -> None:
    model = words()
    model["lm_head"].weight = model["emb"].weight
    check_tied(model, find_plan(model, 2))
    with pytest.raises(ConfigurationError, match="share a parameter, but the plan splits them differently"):
        check_tied(model, given_plan(model, {"emb": "vocab"}, 2))


class PerhapsWithTable(Heads):
    def __init__(self, table: bool) -> None:
        super().__init__(head_dim=3)
        if table:
            self.bias_table = nn.Embedding(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.mixed(x).view(*x.shape[:-1], -1, self.head_dim)
        if hasattr(self, "bias_table"):
            q = q * self.bias_table.weight[0, :, None]
        return self.o_proj(q.flatten(-2))


def test_an_attention_stays_whole_where_one_of_its_class_does() -> None:
    """The first hands the others a bias of all heads, as in T5."""
    plan = find_plan(nn.Sequential(PerhapsWithTable(True), PerhapsWithTable(False), nn.Sequential(Pair())), 2)
    assert set(plan.styles) == {"2.0.up", "2.0.down"}
    assert "0 of the same class is whole" in plan.whole["1"]


def test_a_head_that_shares_a_parameter_with_something_else_stays_whole() -> None:
    model = nn.ModuleDict({"words": words(), "pair": Pair(), "other": nn.LayerNorm(20)})
    model["other"].bias = model["words"]["lm_head"].bias
    plan = find_plan(model, 2)
    assert set(plan.styles) == {"pair.up", "pair.down"}
    assert "other shares a parameter with it" in str(plan)
