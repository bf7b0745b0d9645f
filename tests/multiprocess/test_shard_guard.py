# SPDX-License-Identifier: Apache-2.0
"""Sharded models whose ranks would step them differently: an error on every rank that names what differs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import rankwise as rw
from rankwise import testing
from rankwise.errors import ReplicasDiffer

if TYPE_CHECKING:
    from rankwise.world.facts import World


def _train(world: World, mistake: str, num_ranks: int) -> list[float]:
    if num_ranks > 3:
        rw.mesh(dp_replicate=2, dp_shard=2)
    torch.manual_seed(0)
    model = rw.shard(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double(), blocks=["0"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    rates = []
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for step, x in enumerate(rw.DataLoader(data, global_batch_size=4)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if not (mistake == "skipped" and step == 2 and world.rank == 1):
            optimizer.step()
        # What is given to the scheduler rises: on all ranks, or on one alone.
        plateau.step(float(step if mistake != "own loss" or world.rank == 1 else -step))
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        ("own loss", "lr of SGD is not the same on all ranks before step 3: ranks would train 0.weight of Sequential"),
        ("skipped", "Ranks have stepped the optimizers of Sequential a different number of times before step 4"),
    ],
)
def test_diverging_state_is_named_on_every_rank(mistake: str, named: str, num_ranks: int) -> None:
    for result in testing.run_ranks(_train, num_ranks, mistake, num_ranks):
        with pytest.raises(ReplicasDiffer) as raised:
            result.get()
        assert named in str(raised.value)


def test_schedulers_that_agree_are_not_reported() -> None:
    first, second = (one.get() for one in testing.run_ranks(_train, 2, "none", 2))
    assert first == second
    assert first[-1] < 0.01
