# SPDX-License-Identifier: Apache-2.0
"""Which modules are never split: by structure, by transformers' own word, by the user's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rankwise.errors import ConfigurationError
from rankwise.replicate.blocks import block_of, blocks, has_forward, is_plain_container, reasons


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.flatten(1))


class Pair(nn.Sequential):
    """A container that records how it is called and passes nothing on."""


class Parallel(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([module(x) for module in self]).sum(0)


class Trunk(nn.Module):
    """Holds its blocks as a LlamaModel does, and combines values itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.layers = nn.ModuleList([Residual(), Residual()])
        self.norm = nn.LayerNorm(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + 1
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(2))
        self.trunk = Trunk()
        self.alone = Residual()
        self.chain = Chain()
        self.groups = nn.ModuleDict({"a": Pair(nn.Linear(2, 2), nn.Tanh()), "b": Parallel([nn.Linear(2, 2)])})
        self.again = self.chain


def test_blocks_by_structure() -> None:
    model = Model()
    names = blocks(model)
    assert names == [
        "trunk.embed",
        "trunk.layers.0",
        "trunk.layers.1",
        "trunk.norm",
        "alone",
        "chain.layers.0",
        "chain.layers.1",
        "groups.a.0",
        "groups.a.1",
        "groups.b",
    ]
    outside = [name for name, _ in model.named_parameters() if block_of(name, names) is None]
    assert outside == ["position"]
    why = reasons(model)
    assert why["trunk.layers.1"] == "Residual is one of the blocks of trunk.layers"
    assert why["alone"] == "Residual combines values of its submodules"
    assert blocks(nn.Linear(1, 1)) == [""]
    assert blocks(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))) == ["0", "1"]


def test_blocks_by_name_and_class() -> None:
    model = Model()
    assert blocks(model, [""]) == [""]
    named = blocks(model, ["trunk", Pair])
    assert named[0] == "trunk"
    assert "groups.a" in named
    model._no_split_modules = ["Trunk", "Chain"]
    assert blocks(model)[:3] == ["trunk", "alone", "chain"]


def test_names_that_are_not_there() -> None:
    with pytest.raises(ConfigurationError, match=r"no module named 'trunk\.layer\.0'") as caught:
        blocks(Model(), ["trunk.layer.0"])
    assert "trunk.layers.0" in str(caught.value)
    with pytest.raises(ConfigurationError, match="no module named 'norm'") as caught:
        blocks(Model(), "norm")
    assert "near it: trunk.norm" in str(caught.value)
    with pytest.raises(ConfigurationError, match="no module of this class"):
        blocks(Model(), [nn.Conv2d])
    model = Model()
    assert blocks(model, "trunk") == blocks(model, ["trunk"])
    assert blocks(model, Pair) == blocks(model, [Pair])
    for wrong, words in ((3, "3"), ([3], "3"), ([int], "<class 'int'>"), (model.trunk, "a Trunk"), (None, "None")):
        with pytest.raises(
            ConfigurationError, match=f"keep_whole must contain names or classes of modules, got {words}"
        ):
            blocks(model, wrong)  # type: ignore[arg-type]


def test_containers() -> None:
    assert [is_plain_container(m) for m in (nn.Sequential(), nn.ModuleList(), Pair(), Parallel(), Chain())] == [
        True, True, True, False, False,
    ]  # fmt: skip
    assert [has_forward(m) for m in (nn.ModuleList(), nn.ParameterList(), nn.Sequential(), Chain())] == [
        False, False, True, True,
    ]  # fmt: skip


def test_a_transformer() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        config = LlamaConfig(
            num_hidden_layers=2, hidden_size=8, intermediate_size=8, vocab_size=8, num_attention_heads=2
        )
        model = LlamaForCausalLM(config)
    assert blocks(model) == [
        "model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head",
    ]  # fmt: skip
