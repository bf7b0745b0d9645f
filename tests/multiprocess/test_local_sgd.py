# SPDX-License-Identifier: Apache-2.0
"""Worker groups: what a round computes, on any mesh, also with batches that are empty on a worker group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from on_ranks import one_rank
from replicas import TOLERANCE, Net, batches, built, largest_difference, part
from torch import nn
from worker_groups import assert_same_on_all_ranks, step, values

import rankwise as rw
from rankwise.testing import run_ranks as run_plain_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from on_ranks import RunRanks
    from replicas import Parameters

    from rankwise.pipeline.step_api import Pipeline
    from rankwise.world.facts import World

SIZES = [8, 5, 1, 7, 2, 6]
"""Of the global batches: divisible or not, and too small for every rank."""


class Plain(nn.Sequential):
    """What can be split over ranks, and cut into stages."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))


# -- every=1 with plain SGD is data parallel ---------------------------------------------------------


def _every_step(world: World, worker_groups: int, optimizer_first: bool) -> Parameters:
    if worker_groups < world.world_size:
        rw.mesh(worker_groups=worker_groups, dp_replicate=world.world_size // worker_groups)
    model = built(Net)
    if worker_groups < world.world_size:
        rw.replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer_first else None
    outer = rw.local_sgd(model, every=1)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(SIZES):
        step(model, optimizer, part(x, world.rank, world.world_size), part(y, world.rank, world.world_size))
        assert_same_on_all_ranks(model)
    assert outer.state_dict()["num_rounds"] == len(SIZES)
    return values(model)


@pytest.mark.parametrize(("world_size", "worker_groups"), [(3, 3), (4, 2)])
def test_a_round_of_one_step_of_sgd_is_data_parallel_to_rounding(
    run_ranks: RunRanks, world_size: int, worker_groups: int
) -> None:
    alone = one_rank(_every_step, 1, False)
    for result in run_ranks(_every_step, world_size, worker_groups, world_size == 3):
        assert largest_difference(result.get(), alone) < TOLERANCE


# -- rounds against a simulation on one rank ---------------------------------------------------------


def _outer_step(
    anchor: Parameters, ends: Sequence[tuple[Parameters, float]], momentum: Parameters, diloco: rw.DiLoCo | None
) -> None:
    """Move the anchor, in place, as written in the paper."""
    total = sum(weight for _, weight in ends)
    for name, begun in anchor.items():
        change = sum((begun - end[name]) * (weight / total) for end, weight in ends)
        if diloco is not None:
            momentum[name] = diloco.momentum * momentum[name] + change
            change = diloco.lr * (change + diloco.momentum * momentum[name])
        begun.sub_(change)


@dataclass(frozen=True)
class Way:
    """How worker groups train."""

    mesh: dict[str, int]
    every: int
    overlap: int
    diloco: rw.DiLoCo | None = None
    worker_groups: int = 2
    num_steps: int = 11

    @property
    def make(self) -> type[nn.Module]:
        return Plain if {"tp", "pp"} & set(self.mesh) else Net

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the global batches; a pipeline alone on its worker group cannot do without samples."""
        return batches([max(SIZES[number % len(SIZES)], self.mesh.get("pp", 1)) for number in range(self.num_steps)])


class Simulation:
    """Worker groups of one device each, on this rank, that synchronise in the end."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self.models = [built(way.make) for _ in range(way.worker_groups)]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in self.models]
        self.anchor = values(self.models[0])
        self.momentum = {name: torch.zeros_like(value) for name, value in self.anchor.items()}
        self.ends: list[tuple[Parameters, float]] = []
        self.weights = [0.0] * way.worker_groups

    def run(self) -> Parameters:
        """Return the parameters that all worker groups come to."""
        steps = 0
        for x, y in self.way.batches():
            self._step(x, y)
            steps += 1
            if steps == self.way.overlap:
                self._apply()
            if steps == self.way.every:
                steps = 0
                self._end_round()
                if not self.way.overlap:
                    self._apply()
        self._apply()
        if steps:
            self._end_round()
            self._apply()
        return self.anchor

    def _step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        for worker_group, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            own_x, own_y = part(x, worker_group, self.way.worker_groups), part(y, worker_group, self.way.worker_groups)
            self.weights[worker_group] += len(own_x)
            if len(own_x):
                step(model, optimizer, own_x, own_y)

    def _end_round(self) -> None:
        self.ends = list(zip(map(values, self.models), self.weights, strict=True))
        self.weights = [0.0] * self.way.worker_groups

    @torch.no_grad()
    def _apply(self) -> None:
        if not self.ends:
            return
        _outer_step(self.anchor, self.ends, self.momentum, self.way.diloco)
        for model, (end, _) in zip(self.models, self.ends, strict=True):
            for name, parameter in model.named_parameters():
                parameter.copy_(self.anchor[name] + (parameter - end[name]))
        self.ends = []


def _spread(model: nn.Module, mesh: dict[str, int]) -> Pipeline | None:
    if "tp" in mesh:
        rw.tensor_parallel(model, {"0": "column", "2": "row"})
    if "dp_replicate" in mesh:
        rw.replicate(model)
    if "dp_shard" in mesh:
        rw.shard(model)
    if "pp" in mesh:
        example = torch.zeros(4, 6, dtype=torch.float64)
        return rw.pipeline(model, nn.functional.mse_loss, example=example, micro_batches=2)
    return None


def _rounds(world: World, way: Way) -> Parameters:
    if way.mesh:
        rw.mesh(**way.mesh)
    num_local = world.world_size // way.worker_groups
    worker_group, local = divmod(world.rank, num_local)
    model = built(way.make)
    if {"tp", "pp"} & set(way.mesh):
        local, num_local = 0, 1
    pipe = _spread(model, way.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = rw.local_sgd(model, every=way.every, overlap=way.overlap, outer=way.diloco or "mean")
    for x, y in way.batches():
        own_x, own_y = (part(part(one, worker_group, way.worker_groups), local, num_local) for one in (x, y))
        if pipe is None:
            step(model, optimizer, own_x, own_y)
        else:
            optimizer.zero_grad()
            pipe(own_x, own_y)
            optimizer.step()
    outer.synchronize()
    rounds = outer.state_dict()["num_rounds"]
    outer.synchronize()
    assert outer.state_dict()["num_rounds"] == rounds, "nothing was left to exchange"
    if pipe is None:
        assert_same_on_all_ranks(model)
    return values(model)


def _ids(value: object) -> str:
    return str(value.mesh) if isinstance(value, Way) else str(value)


@pytest.mark.parametrize(
    ("world_size", "way"),
    [
        (3, Way({}, every=4, overlap=0, worker_groups=3)),
        (4, Way({"worker_groups": 2, "dp_replicate": 2}, every=5, overlap=1, diloco=rw.DiLoCo(lr=0.5, momentum=0.5))),
    ],
    ids=_ids,
)
def test_rounds_over_any_exchange_are_those_of_a_simulation(run_ranks: RunRanks, world_size: int, way: Way) -> None:
    _check_rounds(run_ranks, world_size, way)


@pytest.mark.parametrize(
    ("world_size", "way"),
    [
        (4, Way({"worker_groups": 2, "dp_shard": 2}, every=3, overlap=2, diloco=rw.DiLoCo())),
        (4, Way({"worker_groups": 2, "tp": 2}, every=4, overlap=2)),
        (4, Way({"worker_groups": 2, "pp": 2}, every=4, overlap=3, diloco=rw.DiLoCo())),
    ],
    ids=_ids,
)
def test_rounds_on_any_mesh_are_those_of_a_simulation(world_size: int, way: Way) -> None:
    _check_rounds(run_plain_ranks, world_size, way)


def _check_rounds(run_ranks: RunRanks, world_size: int, way: Way) -> None:
    expected = Simulation(way).run()
    found = [result.get() for result in run_ranks(_rounds, world_size, way)]
    for held in found:
        assert largest_difference(held, {name: expected[name] for name in held}) < TOLERANCE
    assert set[str]().union(*found) == set(expected)
