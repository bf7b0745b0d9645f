# SPDX-License-Identifier: Apache-2.0
"""A rank that dies or stops inside an exchange: the others say so at once and by name, and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from left_in_memory import held, names, names_left
from torch import nn

import rankwise as rw
from rankwise.comm.backends.engine import Counters
from rankwise.errors import PeerMissing
from rankwise.testing import RankDied, kill_self
from rankwise.testing import run_ranks as run_ranks_auto

if TYPE_CHECKING:
    from collections.abc import Callable

    from on_ranks import RunRanks

    from rankwise.world.facts import World

pytestmark = pytest.mark.every_exchange

LIMIT_SECONDS = 5.0
NUM_RANKS = 3


def _train(num_steps: int) -> None:
    torch.manual_seed(0)
    model = rw.replicate(nn.Sequential(*[nn.Linear(500, 500) for _ in range(8)]))
    for _ in range(num_steps):
        model(torch.randn(2, 500)).square().mean().backward()
        rw.all_reduce(torch.ones(400_000))


def _end_at_post(number: int, end: Callable[[], None], *, before: bool) -> None:
    """Have this rank end just before, or just after, it moves a counter for the ``number``-th time."""
    post = Counters.post
    count = 0

    def counted(counters: Counters, value: int) -> None:
        nonlocal count
        count += 1
        if count == number and before:
            end()
        post(counters, value)
        if count == number:
            end()

    Counters.post = counted  # type: ignore[method-assign]


def _die_in_an_exchange(world: World, number: int, path: str, *, before: bool) -> float:
    def die() -> None:
        Path(path).write_text(str(time.time()), encoding="utf-8")
        kill_self()

    rw.barrier()
    if world.rank == 1:
        _end_at_post(number, die, before=before)
    try:
        _train(5)
    except PeerMissing as error:
        assert error.ranks == (1,), error
        return time.time() - float(Path(path).read_text(encoding="utf-8"))
    raise AssertionError("the others went on without rank 1")


def _die_after(world: World, number: int, path: str) -> float:
    return _die_in_an_exchange(world, number, path, before=False)


def _die_before(world: World, number: int, path: str) -> float:
    return _die_in_an_exchange(world, number, path, before=True)


@pytest.mark.parametrize("when", [_die_before, _die_after])
@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 13, 21, 34, 55])
def test_a_rank_killed_at_any_stage_is_named_by_all_within_five_seconds(
    when: Callable[..., float], number: int, tmp_path: Path
) -> None:
    results = run_ranks_auto(when, NUM_RANKS, number, str(tmp_path / "time"), exchange="shared_memory")
    assert isinstance(results[1].error, RankDied)
    for rank in (0, 2):
        assert results[rank].get() < LIMIT_SECONDS


def _stop_in_an_exchange(world: World) -> None:
    rw.barrier()
    if world.rank == 1:
        _end_at_post(12, lambda: os.kill(os.getpid(), signal.SIGSTOP), before=True)
    _train(5)


def test_a_rank_stopped_inside_an_exchange_is_named_after_the_limit() -> None:
    results = run_ranks_auto(
        _stop_in_an_exchange, NUM_RANKS, exchange="shared_memory", join_timeout_seconds=1.5, timeout_seconds=8.0
    )
    for rank in (0, 2):
        error = results[rank].error
        assert isinstance(error, PeerMissing)
        assert error.ranks == (1,)
        assert "no answer" in str(error)


def _all_die(world: World) -> None:
    _end_at_post(9 + world.rank, kill_self, before=bool(world.rank))
    _train(5)


def test_nothing_of_ranks_that_were_all_killed_is_left() -> None:
    before = names()
    results = run_ranks_auto(_all_die, NUM_RANKS, exchange="shared_memory")
    assert all(isinstance(result.error, RankDied) for result in results)
    assert held() == [], "the memory is freed"
    assert names_left(before) == set()


def _one_of_four_dies(world: World, dying: int) -> None:
    rw.barrier()
    if world.rank == dying:
        kill_self()
    _train(1)


@pytest.mark.parametrize("dying", [1, 2])
def test_one_of_four_is_named_by_those_it_was_not_connected_with(dying: int, run_ranks: RunRanks) -> None:
    results = run_ranks(_one_of_four_dies, 4, dying)
    for rank in {0, 1, 2, 3} - {dying}:
        error = results[rank].error
        assert isinstance(error, PeerMissing), error
        assert error.ranks == (dying,)
