# SPDX-License-Identifier: Apache-2.0
"""`replicate`: buffers follow rank zero before each training forward, whatever becomes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import rankwise as rw

if TYPE_CHECKING:
    from collections.abc import Callable

    from on_ranks import RunRanks
    from replicas import Parameters

    from rankwise.world.facts import World


def _moving_buffers(world: World) -> tuple[Parameters, Parameters]:
    torch.manual_seed(0)
    model = rw.replicate(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(3):
        model(torch.randn(5, 3, generator=generator)).sum().backward()
    before = {k: v.clone() for k, v in model.named_buffers()}
    model.train()
    torch.nn.Module.__call__(model, torch.randn(5, 3, generator=generator)).sum().backward()
    return before, {n: p.grad for n, p in model.named_parameters()}


def test_buffers_that_change_follow_rank_zero(run_ranks: RunRanks) -> None:
    results = [result.get() for result in run_ranks(_moving_buffers, 2)]
    # Each rank adds its last batch to statistics that were rank zero's: with momentum 0.1 they are close.
    for key, value in results[0][0].items():
        if key.endswith("num_batches_tracked"):
            assert torch.equal(value, results[1][0][key])
        else:
            assert not torch.equal(value, results[1][0][key])
            assert torch.allclose(value, results[1][0][key], atol=0.5)


class Keeper(nn.Module):
    """Buffers that are replaced, that start to change late, that are large, and of an odd dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("late", torch.zeros(2))
        self.register_buffer("table", torch.arange(200_000.0))
        self.register_buffer("odd", torch.zeros(3, dtype=torch.int16))
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        mean = x.detach().mean()
        self.replaced = self.replaced + mean
        if self.num_calls > 2:
            self.late.add_(mean)
            self.odd.add_(round(float(mean) * 100))
        return self.layer(x)


def _keep(world: World, large: bool) -> Parameters:
    torch.manual_seed(0)
    model = Keeper()
    if not large:
        model.table = torch.arange(10.0)
    rw.replicate(model)
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(5):
        model(torch.randn(4, 3, generator=generator)).sum().backward()
    # One more forward in which nothing is random: what it starts from is equal on all ranks.
    model(torch.zeros(1, 3))
    return {k: v.clone() for k, v in model.named_buffers()}


@pytest.mark.parametrize("large", [False, True])
def test_buffers_replaced_or_changed_late_follow_rank_zero(run_ranks: RunRanks, large: bool) -> None:
    results = [result.get() for result in run_ranks(_keep, 3, large)]
    for other in results[1:]:
        for key, value in results[0].items():
            assert torch.equal(other[key], value), key
    assert results[0]["late"].any()
    assert results[0]["odd"].any()


class Shift(nn.Module):
    """A layer with one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(4))


class Host(nn.Module):
    """Layers in every kind of container, with or without buffers."""

    def __init__(self, start: str) -> None:
        super().__init__()
        make = nn.Identity if start == "bare" else Shift
        self.layer = nn.Linear(3, 2)
        self.child = make()
        self.several = nn.ModuleList([make(), make()])
        self.row = nn.Sequential(make(), make())
        self.named = nn.ModuleDict({"a": make()})
        self.register_buffer("nothing", None)
        if start != "bare":
            shared = torch.zeros(4)
            self.register_buffer("one", shared)
            self.register_buffer("same", shared)
            self.tied = self.several[1]
        if start == "large":
            self.register_buffer("table", torch.zeros(200_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


# What is done to a model that has been trained already. `spare` is a layer as old as the model.
ADDED: dict[str, Callable[[Host, Shift], object]] = {
    "registered": lambda model, _: model.register_buffer("late", torch.zeros(4)),
    "registered below": lambda model, _: model.child.register_buffer("late", torch.zeros(4)),
    "assigned as a Buffer": lambda model, _: setattr(model, "late", nn.Buffer(torch.zeros(4))),
    "None at first": lambda model, _: setattr(model, "nothing", torch.zeros(4)),
    "layer assigned": lambda model, spare: setattr(model, "late", spare),
    "layer added": lambda model, spare: model.add_module("late", spare),
    "layer in another's place": lambda model, spare: setattr(model, "child", spare),
    "layer appended": lambda model, spare: model.several.append(spare),
    "layer set in a list": lambda model, spare: model.several.__setitem__(0, spare),
    "layer set in a dict": lambda model, spare: model.named.update({"late": spare}),
    "layer inserted": lambda model, spare: model.several.insert(1, spare),
    "layer inserted in a row": lambda model, spare: model.row.insert(0, spare),
    "layer inserted in another's place": lambda model, spare: (
        model.several.__delitem__(0),
        model.several.insert(0, spare),
    ),
    "layer inserted after nothing was deleted": lambda model, spare: (
        model.several.__delitem__(slice(2, None)),
        model.several.insert(0, spare),
    ),
}
REPLACED: dict[str, Callable[[Host, Shift], object]] = {
    "replaced": lambda model, _: setattr(model.child, "value", torch.zeros(4)),
    "replaced by a larger one": lambda model, _: setattr(model.child, "value", torch.zeros(100_000)),
    "no longer the same as another": lambda model, _: setattr(model, "same", torch.zeros(4)),
    "set to None": lambda model, _: setattr(model.child, "value", None),
    "set to None and back": lambda model, _: (
        setattr(model.child, "value", None),
        setattr(model.child, "value", torch.zeros(4)),
    ),
    "deleted": lambda model, _: delattr(model.child, "value"),
    "deleted and registered": lambda model, _: (
        delattr(model.child, "value"),
        model.child.register_buffer("value", torch.zeros(4)),
    ),
    "layer deleted": lambda model, _: delattr(model, "child"),
    "layer set to None": lambda model, _: setattr(model, "child", None),
    "layer without buffers in its place": lambda model, _: setattr(model, "child", nn.Identity()),
    "layer deleted from a list": lambda model, _: model.several.__delitem__(0),
    "layer popped from a list": lambda model, _: model.several.pop(0),
    "layer popped from a row": lambda model, _: model.row.pop(0),
    "layer popped from a dict": lambda model, _: model.named.pop("a"),
    "dict cleared": lambda model, _: model.named.clear(),
    "one of two ties deleted": lambda model, _: delattr(model, "tied"),
    "both ties deleted": lambda model, _: (delattr(model, "tied"), model.several.__delitem__(1)),
}

KEEPS = {"no longer the same as another", "one of two ties deleted"}
"""What leaves every buffer in the model, in another of its places."""


def _edit(world: World, start: str) -> dict[str, tuple[list[float], list[float]]]:
    """Return for each edit what the buffers that the model has, and those it had, begin with after a forward."""
    values = {}
    for name, edit in (ADDED if start == "bare" else ADDED | REPLACED).items():
        model, spare = rw.replicate(Host(start)), Shift()
        model(torch.zeros(1, 3))
        before = list(model.buffers())
        edit(model, spare)
        after = list(model.buffers())
        removed = [buffer for buffer in before if all(buffer is not other for other in after)]
        for buffer in after + removed:
            buffer.fill_(world.rank + 1)
        model(torch.zeros(1, 3))
        values[name] = [buffer[0].item() for buffer in after], [buffer[0].item() for buffer in removed]
    return values


@pytest.mark.parametrize("start", ["bare", "few", "large"])
def test_buffers_follow_whatever_is_done_to_the_model(run_ranks: RunRanks, start: str) -> None:
    for rank, result in enumerate(run_ranks(_edit, 2, start)):
        for name, (has, had) in result.get().items():
            assert has or start != "bare", name
            assert had or name in ADDED or name in KEEPS, name
            assert has == [1.0] * len(has), (name, "follows rank zero")
            assert had == [rank + 1.0] * len(had), (name, "is left alone")
