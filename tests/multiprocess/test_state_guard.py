# SPDX-License-Identifier: Apache-2.0
"""Replicas that part are named on every rank, with what differs; replicas that agree never are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn import functional

import rankwise as rw
from rankwise.errors import ReplicasDiffer
from rankwise.parallel.state_guard.facts import add_fact

if TYPE_CHECKING:
    from collections.abc import Callable

    from on_ranks import RunRanks

    from rankwise.world import World

    AfterStep = Callable[["Training", int], None]


class Net(nn.Module):
    """A model with a table that the script may change, beside what an optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 3), requires_grad=False)
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x + self.table[: len(x)]))))


class Training:
    """One rank's training, which a test changes between steps."""

    def __init__(self, world: World) -> None:
        torch.manual_seed(0)
        self.rank = world.rank
        self.model = rw.replicate(Net().double(), sync_batchnorm=True)
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.0188)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0)
        self.validation = torch.full((2, 3), 1.0 + world.rank, dtype=torch.float64)
        self.skips = False
        self.generator = torch.Generator().manual_seed(world.rank)

    def run(self, after_step: AfterStep, num_steps: int) -> str:
        for step in range(1, num_steps + 1):
            x = torch.randn(4, 3, dtype=torch.float64, generator=self.generator)
            functional.mse_loss(self.model(x), x.sum(1, keepdim=True)).backward()
            if not self.skips:
                self.optimizer.step()
            self.optimizer.zero_grad()
            after_step(self, step)
        return "trained"


def _plateau(training: Training, step: int) -> None:
    # The validation loss of rank 0 falls, and those of the others rise.
    training.scheduler.step(float(step if training.rank else -step))


def _table(training: Training, _: int) -> None:
    with torch.no_grad():
        training.model.table[training.rank] += 0.1


def _loaded_first(training: Training, step: int) -> None:
    if step == 3 and training.rank == 0:
        torch.manual_seed(1)
        training.model.load_state_dict(Net().double().state_dict())


def _momentum(training: Training, step: int) -> None:
    if step == 5:
        training.optimizer.param_groups[0]["momentum"] = 0.1 * training.rank


def _skipped(training: Training, step: int) -> None:
    training.skips = step == 4 and training.rank == 1


def _statistics(training: Training, step: int) -> None:
    if step == 1 and training.rank == 1:
        training.model.norm.running_var.mul_(2)


def _fact(training: Training, step: int) -> None:
    if step == 2:
        add_fact("How often this was called", lambda: 7 + training.rank, do="call it equally often")


def _scaled_gradients(training: Training, step: int) -> None:
    # Of one rank's own making: one element, once.
    if step == 6 and training.rank == 1:
        with torch.no_grad():
            training.model.last.weight[0, 2] += 1e-6


CASES: dict[str, tuple[AfterStep, int, list[str]]] = {
    "plateau": (
        _plateau,
        4,
        [
            "lr of SGD is not the same on all ranks before step 3: ranks would train first.weight of Net differently.",
            "rank 0: 0.0188\n            rank{}: 0.0094",
            "scheduler.step(rankwise.mean(loss, num_samples))",
        ],
    ),
    "table": (
        _table,
        3,
        [
            "Parameter table of Net is not the same on all ranks in step 2.",
            "no optimizer has stepped it",
            "rankwise.all_reduce(update, 'mean')",
        ],
    ),
    "loaded on rank 0": (
        _loaded_first,
        6,
        ["Parameter table of Net is not the same on all ranks in step 5.", "differ: parameter table, parameter first"],
    ),
    "momentum": (_momentum, 8, ["momentum of SGD is not the same on all ranks before step 6", "set momentum from"]),
    "skipped": (
        _skipped,
        8,
        [
            "Ranks have stepped the optimizers of Net differently often before step 6.",
            "1 step since the last backward",
            "rank 1: 0 steps since the last backward",
        ],
    ),
    "statistics": (_statistics, 3, ["Buffer norm.running_var of Net is not the same on all ranks in step 2."]),
    "fact": (_fact, 4, ["How often this was called is not the same on all ranks in step 3 of Net.", "checksum 8"]),
    "one element": (
        _scaled_gradients,
        20,
        ["Parameter last.weight of Net is not the same on all ranks in step 9.", "last.weight[0, 2] on", "the other 9"],
    ),
}


def _train(world: World, name: str) -> str:
    after_step, num_steps, _ = CASES[name]
    return Training(world).run(after_step, num_steps)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_parts_is_named_on_every_rank(run_ranks: RunRanks, world_size: int, name: str) -> None:
    for result in run_ranks(_train, world_size, name):
        with pytest.raises(ReplicasDiffer) as raised:
            result.get()
        for words in CASES[name][2]:
            assert words.format(" 1" if world_size == 2 else "s 1-2") in str(raised.value), str(raised.value)
