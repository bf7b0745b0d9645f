# SPDX-License-Identifier: Apache-2.0
"""Settings that differ between the comparisons of a guard: named in the next one, before a save, or at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise import testing
from rankwise.errors import PeerFailed, PeerMissing, ReplicasDiffer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rankwise.world.facts import World

RATE = 0.1
OTHER = "lr of SGD was not the same on all ranks in optimizer step {} of Sequential since step {}."
SKIPPED = "Ranks have stepped the optimizers of Sequential a different number of times."


def _train(world: World, strategy: str, num_steps: int, rate_of: Callable[[int, int], float], skipped: int) -> None:
    """Train with a rate of this rank's own; the last rank skips one step. Nothing of it is kept."""
    torch.manual_seed(0)
    model = getattr(rw, strategy)(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(1, num_steps + 1):
        model(torch.full((2, 3), 1.0 + world.rank, dtype=torch.float64)).square().mean().backward()
        optimizer.param_groups[0]["lr"] = rate_of(step, world.rank)
        if step != skipped or not world.rank:
            optimizer.step()
        optimizer.param_groups[0]["lr"] = RATE
        optimizer.zero_grad()


def _late(step: int, rank: int) -> float:
    return RATE / (1 + rank) if step >= 100 else RATE


def _once(step: int, rank: int) -> float:
    return RATE / (1 + rank) if step == 19 else RATE


def _same(step: int, _: int) -> float:
    return RATE / step


def _trained(world: World, strategy: str, case: str) -> None:
    rates = {"late": _late, "once": _once}
    skipped = {"skipped": 102, "skipped before a save": 98}.get(case, 0)
    _train(world, strategy, 102 if case != "once" else 22, rates.get(case, _same), skipped)
    rw.leave()


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("strategy", ["replicate", "shard"])
@pytest.mark.parametrize(
    ("case", "named"), [("late", OTHER.format(4, 97)), ("skipped", SKIPPED), ("once", OTHER.format(3, 17))]
)
def test_what_differs_in_the_last_steps_is_named_when_the_job_ends(
    strategy: str, case: str, named: str, num_ranks: int
) -> None:
    told = [error for one in testing.run_ranks(_trained, num_ranks, strategy, case) if (error := _error_of(one))]
    assert [named in str(one) for one in told] == [True], told
    if case != "skipped":
        other = "rank 1: 0.05" if num_ranks == 2 else "rank 1: 0.05\n            rank 2: 0.0333"
        assert f"rank 0: 0.1\n            {other}" in str(told[0])


def _error_of(result: testing.RankResult) -> Exception | None:
    """Return the error of the rank that found it; the others have left, or wait for it."""
    try:
        result.get()
    except (PeerFailed, PeerMissing):
        return None
    except ReplicasDiffer as error:
        return error
    return None


def _continued(world: World, strategy: str) -> None:
    _train(world, strategy, 30, _once, 0)


@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_a_rate_that_differed_for_one_step_is_named_in_the_next_comparison(strategy: str) -> None:
    for result in testing.run_ranks(_continued, 2, strategy):
        with pytest.raises(ReplicasDiffer, match="lr of SGD was not the same on all ranks in optimizer step 3"):
            result.get()


def _saved(world: World, folder: Path, skipped: int) -> bool:
    _train(world, "replicate", 22, _same, skipped)
    rw.save(folder / "net", model=nn.Linear(1, 1))
    return True


def test_what_differs_is_named_before_a_checkpoint_is_saved(tmp_path: Path) -> None:
    results = testing.run_ranks(_saved, 3, tmp_path, 20)
    told = [error for one in results if (error := _error_of(one))]
    assert [SKIPPED in str(one) for one in told] == [True], told
    assert not (tmp_path / "net").exists()


def _ends_well(world: World, folder: Path) -> bool:
    torch.manual_seed(0)
    model = rw.replicate(nn.Linear(3, 1).double())
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(1, 19):
        model(torch.ones(2, 3, dtype=torch.float64)).square().mean().backward()
        optimizer.param_groups[0]["betas"] = (0.9, 0.999) if world.rank else [0.9, 0.999]
        optimizer.param_groups[0]["weight_decay"] = 0 if world.rank else 0.0
        optimizer.step()
        optimizer.zero_grad()
        if step % 6 == 0:
            rw.save(folder / f"net-{step}", model=model)
    # No step uses it.
    plateau.step(1.0)
    plateau.step(1.0 + world.rank)
    rw.leave()
    return True


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_values_that_mean_the_same_and_those_that_no_step_uses_are_not_named(tmp_path: Path, num_ranks: int) -> None:
    assert all(one.get() for one in testing.run_ranks(_ends_well, num_ranks, tmp_path))
