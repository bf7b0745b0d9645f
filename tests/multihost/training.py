# SPDX-License-Identifier: Apache-2.0
"""What each rank runs: joins, trains, and writes what it came to into a folder.

Arguments: the folder; keyword arguments of ``rankwise.join`` as JSON; a rank that is killed in its third step, or
nothing. Tests import ``train`` for the one-rank run.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.data import TensorDataset

import rankwise as rw
from rankwise.errors import PeerMissing
from rankwise.testing import kill_self

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World

EPOCHS = 3
KILLED_AT_STEP = 3
Parameters = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One training run."""

    num_samples: int
    global_batch_size: int
    batchnorm: bool
    seed: int


# Sizes that no number of ranks here divides; tails of fewer samples than ranks.
CASES = [
    Case(num_samples=37, global_batch_size=7, batchnorm=False, seed=1),
    Case(num_samples=23, global_batch_size=5, batchnorm=False, seed=2),
    Case(num_samples=29, global_batch_size=9, batchnorm=True, seed=3),
]


def train(_: World, case: Case, before_backward: Callable[[int], None] = lambda _: None) -> Parameters:
    """Train a small model and return its state; ``before_backward`` is called with the number of each step."""
    torch.manual_seed(case.seed)
    x = torch.randn(case.num_samples, 5, dtype=torch.float64)
    y = torch.randn(case.num_samples, 2, dtype=torch.float64)
    norm = nn.BatchNorm1d(7) if case.batchnorm else nn.Identity()
    model = nn.Sequential(nn.Linear(5, 7, bias=not case.batchnorm), norm, nn.Tanh(), nn.Linear(7, 2)).double()
    model = rw.replicate(model, sync_batchnorm=case.batchnorm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = rw.DataLoader(
        TensorDataset(x, y), global_batch_size=case.global_batch_size, shuffle=True, seed=case.seed, remainder="keep"
    )
    step = 0
    for _epoch in range(loader.epoch, EPOCHS):
        for x_part, y_part in loader:
            loss = nn.functional.mse_loss(model(x_part), y_part)
            step += 1
            before_backward(step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return {key: value.clone() for key, value in model.state_dict().items()}


def train_all(world: World) -> list[Parameters]:
    """Return the state that each case trains to."""
    return [train(world, case) for case in CASES]


def _train_until_killed(world: World, killed: int, folder: Path) -> None:
    moment = folder / "killed_at"

    def kill(step: int) -> None:
        if world.rank == killed and step == KILLED_AT_STEP:
            moment.write_text(str(time.time()), encoding="utf-8")
            kill_self()

    try:
        train(world, CASES[0], kill)
    except PeerMissing as error:
        seconds = time.time() - float(moment.read_text(encoding="utf-8"))
        found = {"ranks": error.ranks, "seconds": seconds, "text": str(error)}
        (folder / f"{world.rank}.json").write_text(json.dumps(found), encoding="utf-8")
        raise


def main(folder: Path, join: dict[str, str], killed: int | None) -> None:
    """Do what the arguments say."""
    with rw.join(**join) as world:
        if killed is None:
            torch.save(train_all(world), folder / f"{world.rank}.pt")
        else:
            _train_until_killed(world, killed, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else None)
