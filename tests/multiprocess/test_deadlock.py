# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait for each other in different collectives raise an error at once; waits that end do not."""

from __future__ import annotations

import random
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import rankwise as rw
from rankwise.comm.session import current, exchange_of
from rankwise.errors import CollectiveMismatch, ConfigurationError, PeerFailed
from rankwise.health import collective_timeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from on_ranks import RunRanks

    from rankwise.world.facts import World

SECONDS = 40.0
"""After which a test ends its ranks."""
LIMIT_SECONDS = 600.0
"""Of each collective."""


def _train(world: World, at_each_loss: Callable[[World, torch.Tensor], object]) -> None:
    torch.manual_seed(0)
    model = rw.replicate(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(14, 3), torch.randn(14, 1)
    for x, y in rw.DataLoader(TensorDataset(*data), global_batch_size=4):
        loss = functional.mse_loss(model(x), y)
        at_each_loss(world, loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _log_on_rank_zero(world: World, loss: torch.Tensor) -> None:
    if world.rank == 0:
        rw.log_value("loss", loss)


def _mean_on_the_last_rank(world: World, loss: torch.Tensor) -> None:
    if world.rank == world.world_size - 1:
        rw.mean(loss, 1)


def _save_on_rank_zero(world: World, loss: torch.Tensor) -> None:
    if world.rank == 0:
        rw.save(Path(tempfile.gettempdir(), "rankwise-never-written"), loss=loss.detach())


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("mistake", "called"),
    [
        (_log_on_rank_zero, "log_value of loss"),
        (_mean_on_the_last_rank, "mean"),
        (_save_on_rank_zero, "rankwise.save"),
    ],
)
def test_a_collective_on_some_ranks_is_an_error_long_before_the_timeout(
    run_ranks: RunRanks, num_ranks: int, mistake: Callable[[World, torch.Tensor], object], called: str
) -> None:
    for result in run_ranks(_train, num_ranks, mistake, timeout_seconds=SECONDS, join_timeout_seconds=LIMIT_SECONDS):
        assert isinstance(result.error, CollectiveMismatch), result.error
        words = " ".join(str(result.error).split())
        assert f": {called}" in words
        assert f"in {mistake.__name__}" in words
        assert ": gradients of Linear, bucket 0: float32[4] at " in words
        assert f"make the call for {called} on every rank" in words


def _differ_in_a_group(world: World) -> None:
    """Ranks 0 and 1 have opened more exchanges than rank 2; then all three are in a group with a fourth."""
    pair = rw.new_group([0, 1])
    if pair.rank is not None:
        exchange = exchange_of(pair)
        assert exchange is not None
        exchange.dup()
    three = rw.new_group([0, 1, 2])
    rw.barrier(group=three if world.rank == 1 else None)


def test_a_difference_within_a_group_is_an_error(run_ranks: RunRanks) -> None:
    for result in run_ranks(_differ_in_a_group, 4, timeout_seconds=SECONDS, join_timeout_seconds=LIMIT_SECONDS):
        assert isinstance(result.error, CollectiveMismatch), result.error
        words = " ".join(str(result.error).split())
        assert "in _differ_in_a_group" in words


def _skip_the_last_batch(world: World) -> None:
    model = rw.replicate(nn.Linear(3, 1))
    loader = rw.DataLoader(TensorDataset(torch.randn(8, 3)), global_batch_size=4)
    for number, (x,) in enumerate(loader):
        if number == 1 and world.rank == 1:
            continue
        model(x).mean().backward()
    rw.mean(torch.ones(()), 1)


def test_a_rank_that_skips_the_last_batch_and_averages_is_an_error(run_ranks: RunRanks) -> None:
    for result in run_ranks(_skip_the_last_batch, 2, timeout_seconds=SECONDS, join_timeout_seconds=LIMIT_SECONDS):
        assert isinstance(result.error, CollectiveMismatch), result.error
        assert "skip a step or stop with rankwise.mean(loss, len(x))" in " ".join(str(result.error).split())


def _wait_for_long(world: World, seed: int) -> list[tuple[int, int]]:
    """Use groups and threads in the same order on all ranks, each of which is late now and then.

    Returns what was sent by all, and the same times the number of ranks of the group.
    """
    collective_timeout.LONG_SECONDS = 0.01
    everyone = range(world.world_size)
    groups = [rw.new_group(everyone), *(rw.new_group([rank for rank in everyone if rank != out]) for out in everyone)]
    beside = rw.new_group(everyone)
    late, alike = random.Random(seed + world.rank), random.Random(seed)
    found: list[tuple[int, int]] = []

    def add(number: int, group: rw.Group) -> None:
        if group.rank is not None:
            threading.Event().wait(late.choice([0.0, 0.0, 0.3]))
            found.append((rw.all_reduce(number, group=group), number * group.size))

    def use_the_threads_group() -> None:
        for number in range(10):
            add(number, beside)

    thread = threading.Thread(target=use_the_threads_group)
    thread.start()
    for number in range(100, 125):
        add(number, alike.choice(groups))
    thread.join()
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_waits_that_end_are_none(run_ranks: RunRanks, seed: int) -> None:
    for result in run_ranks(_wait_for_long, 3, seed, timeout_seconds=SECONDS, join_timeout_seconds=LIMIT_SECONDS):
        assert all(total == expected for total, expected in result.get())


def _use_two_threads(world: World) -> None:
    own = rw.new_group(range(world.world_size))
    if world.rank == 1:
        rw.barrier(group=own)
    threading.Thread(target=rw.barrier, daemon=True).start()
    detector = current().detector
    assert detector is not None
    while not detector._awaited:
        threading.Event().wait(0.01)
    rw.all_reduce(2)


def test_two_threads_that_use_one_group_are_an_error(run_ranks: RunRanks) -> None:
    first, second = run_ranks(_use_two_threads, 2, timeout_seconds=SECONDS, join_timeout_seconds=LIMIT_SECONDS)
    assert isinstance(first.error, ConfigurationError), first.error
    assert "while another thread waits in barrier()" in str(first.error)
    assert "rankwise.new_group(range(world.world_size))" in str(first.error)
    assert isinstance(second.error, PeerFailed), second.error
