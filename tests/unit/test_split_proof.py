# SPDX-License-Identifier: Apache-2.0
"""Modules that look as if their layers could be split: only those that compute the same in parts are."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name

from rankwise.errors import ConfigurationError
from rankwise.tensor_parallel.plan import find_plan

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 12


class Mlp(nn.Module):
    """One that can be split; each test changes what lies between, or after."""

    def __init__(self, hidden: int = 8, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return F.gelu(h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x)))


class NormInside(Mlp):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(h, h.shape[-1:])


class SoftmaxInside(Mlp):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h.softmax(-1)


class ScaledByWidth(Mlp):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h / h.shape[-1]


class TrainedInside(Mlp):
    """Its outputs add up; the gradient of the slope would be of one part."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.PReLU()

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return self.act(h)


class NormInTraining(Mlp):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return F.normalize(h, dim=-1) if self.training else h


class NormInEvaluation(Mlp):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h if self.training else F.normalize(h, dim=-1)


class ResidualInside(Mlp):
    """As wide inside as outside."""

    def __init__(self) -> None:
        super().__init__(hidden=WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)) + x)


class HiddenUsedElsewhere(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h) + h.mean(-1, keepdim=True)


class WeightUsed(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(F.linear(x, self.up.weight, self.up.bias)))


class WeightPenalty(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.up.weight.square().mean()


class Appends(Mlp):
    """Keeps what lies between in a list, and counts in a buffer, which the search must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []
        self.register_buffer("count", torch.zeros(()))

    def between(self, h: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        self.seen.append(h.detach())
        return h


class ScaleOutside(Mlp):
    """May be split: the norm and the scale work on what every rank has whole."""

    def __init__(self) -> None:
        super().__init__(hidden=200)
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.zeros(WIDTH))
        nn.init.zeros_(self.down.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * super().forward(self.norm(x))


class Attention(nn.Module):
    """Grouped keys and values; each test changes what happens to heads."""

    def __init__(self, heads: int = 4, kv_heads: int = 2, size: int = 3) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, size
        self.q_proj, self.o_proj = nn.Linear(WIDTH, heads * size), nn.Linear(heads * size, WIDTH)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, kv_heads * size), nn.Linear(WIDTH, kv_heads * size)

    def scores(self, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def mixed(self, y: torch.Tensor) -> torch.Tensor:
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (one(x).view(shape).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
        y = self.scores(q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.o_proj(self.mixed(y).transpose(1, 2).flatten(-2))


class MixesHeads(Attention):
    def mixed(self, y: torch.Tensor) -> torch.Tensor:
        return y + y.mean(1, keepdim=True)


class TalkingHeads(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.talk = nn.Parameter(torch.eye(4))

    def scores(self, scores: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bhqk,hg->bgqk", scores, self.talk)


class NumberPerHead(Attention):
    def scores(self, scores: torch.Tensor) -> torch.Tensor:
        return scores * torch.arange(1, scores.shape[1] + 1)[:, None, None]


class RollsHeads(Attention):
    def mixed(self, y: torch.Tensor) -> torch.Tensor:
        return y.roll(1, dims=1)


WRONG = {
    one.__name__: one
    for one in (
        NormInside, SoftmaxInside, ScaledByWidth, TrainedInside, NormInTraining, NormInEvaluation, ResidualInside,
        HiddenUsedElsewhere, WeightUsed, WeightPenalty, Appends, MixesHeads, TalkingHeads, NumberPerHead, RollsHeads,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_module_that_computes_something_else_in_parts_stays_whole(name: str) -> None:
    plan = find_plan(nn.ModuleDict({"inner": WRONG[name](), "sure": Mlp()}), 2)
    assert set(plan.styles) == {"sure.up", "sure.down"}
    assert {name.partition(".")[0] for name in plan.whole} == {"inner"}


@pytest.mark.parametrize(
    "wrong",
    [NormInside, SoftmaxInside, ScaledByWidth, NormInTraining, HiddenUsedElsewhere, WeightUsed, WeightPenalty],
)
def test_wrong_splits_of_wide_layers_are_found_too(wrong: type[Mlp]) -> None:
    """Their trial has weights of low rank."""
    with torch.device("meta"):
        model = nn.ModuleDict({"inner": wrong(300, 4000), "sure": Mlp(300, 4000)})
    plan = find_plan(model, 2)
    assert set(plan.styles) == {"sure.up", "sure.down"}
    assert {name.partition(".")[0] for name in plan.whole} == {"inner"}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("build", [Mlp, ScaleOutside])
def test_a_module_that_computes_the_same_in_parts_is_split(build: Callable[[], nn.Module], tp: int) -> None:
    """Also where weights are zero, in which nothing could be seen."""
    assert find_plan(build(), tp).styles == {"up": "column", "down": "row"}


@pytest.mark.parametrize(("kv_heads", "tp"), [(1, 2), (2, 4), (4, 3)])
def test_heads_that_ranks_cannot_share_are_an_error(kv_heads: int, tp: int) -> None:
    with pytest.raises(ConfigurationError, match=f"cannot be divided evenly among {tp} ranks"):
        find_plan(Attention(4, kv_heads), tp)


def test_heads_that_do_not_share_keys_evenly_stay_whole() -> None:
    plan = find_plan(nn.ModuleDict({"inner": Attention(6, 4), "sure": Mlp()}), 2)
    assert set(plan.whole) == {"inner"}


def test_a_model_is_as_it_was() -> None:
    model, sure = Appends(), Mlp()
    model.up.weight.grad = torch.ones_like(model.up.weight)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = dict(vars(model.up))
    numbers, number = torch.get_rng_state(), random.getstate()
    threads = torch.get_num_threads()
    find_plan(nn.ModuleDict({"inner": model, "sure": sure}), 2)
    assert model.training
    assert model.seen == []
    assert vars(model.up) == attributes
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model.up.weight.grad, torch.ones_like(model.up.weight))
    assert torch.equal(torch.get_rng_state(), numbers)
    assert random.getstate() == number
    assert torch.get_num_threads() == threads


def test_layers_that_are_alike_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []

    def counted(self: Mlp, x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return self.down(self.up(x))

    monkeypatch.setattr(Mlp, "forward", counted)
    find_plan(Mlp(), 2)
    once = len(runs)
    assert len(find_plan(nn.ModuleList([Mlp() for _ in range(5)]), 2).styles) == 10
    assert len(runs) == 2 * once


class Narrow(Mlp):
    """Normalizes the hidden features on request."""

    norms = False

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return F.normalize(h, dim=-1) if self.norms else h


def test_layers_whose_attributes_differ_are_tried_each() -> None:
    layers = [Narrow() for _ in range(3)]
    layers[1].norms = True
    assert set(find_plan(nn.ModuleList(layers), 2).whole) == {"1.down"}


def test_only_few_of_many_features_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run follows layers at their full width."""
    widths: set[int] = set()

    def seen(_: Mlp, h: torch.Tensor) -> torch.Tensor:
        widths.add(h.shape[-1])
        return h

    monkeypatch.setattr(Mlp, "between", seen)
    with torch.device("meta"):
        model = Mlp(hidden=2**17, width=64)
    assert find_plan(model, 2).styles == {"up": "column", "down": "row"}
    assert widths == {64, 128, 2**17}
