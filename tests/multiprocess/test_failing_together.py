# SPDX-License-Identifier: Apache-2.0
"""One rank's failure is everyone's error, within seconds and by name."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import rankwise as rw
from rankwise.comm import agreement
from rankwise.comm.leave import fail
from rankwise.errors import (
    CollectiveMismatch,
    ConfigurationError,
    PeerFailed,
    PeerMissing,
)
from rankwise.testing import RankDied, kill_self

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World

pytestmark = pytest.mark.every_exchange

LIMIT_SECONDS = 5.0


def _raise_between_collectives(world: World, failing: int) -> None:
    rw.barrier()
    if world.rank == failing:
        message = "the batch is bad"
        raise ValueError(message)
    rw.all_reduce(torch.ones(3))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_raising_rank_makes_every_rank_raise_its_error(run_ranks: RunRanks, failing: int) -> None:
    results = run_ranks(_raise_between_collectives, 3, failing)
    for rank, result in enumerate(results):
        if rank == failing:
            assert isinstance(result.error, ValueError)
        else:
            assert isinstance(result.error, PeerFailed)
            assert result.error.rank == failing
            assert "the batch is bad" in str(result.error)
            assert "_raise_between_collectives" in str(result.error)


def _join_after_a_failure(world: World) -> str:
    error = ValueError("bad")
    fail(error)
    with pytest.raises(ConfigurationError, match="of a failed world") as caught:
        rw.join()
    return str(caught.value)


def test_a_process_whose_world_failed_is_asked_to_end(run_ranks: RunRanks) -> None:
    for result in run_ranks(_join_after_a_failure, 2):
        assert "rankwise run --max-restarts" in result.get()


def _raise_beside_a_wait_of_torch(world: World, failing: int) -> None:
    torch.distributed.all_reduce(torch.ones(3))
    if world.rank == failing:
        message = "the batch is bad"
        raise ValueError(message)
    torch.distributed.all_reduce(torch.ones(3))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_connection_that_broke_in_torch_is_recognized_by_its_reason(run_ranks: RunRanks, failing: int) -> None:
    results = run_ranks(_raise_beside_a_wait_of_torch, 3, failing)
    assert isinstance(results[failing].error, ValueError)
    for rank in {0, 1, 2} - {failing}:
        error = results[rank].error
        assert isinstance(error, PeerFailed)
        assert error.rank == failing


def _seconds_from_failure_to_error(world: World, path: str) -> float | None:
    rw.barrier()
    if world.rank == 1:
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(str(time.time()))
        message = "now"
        raise ValueError(message)
    try:
        rw.barrier()
    except PeerFailed:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            return time.time() - float(file.read())
    return None


def test_the_error_comes_within_five_seconds(run_ranks: RunRanks, tmp_path: os.PathLike[str]) -> None:
    results = run_ranks(_seconds_from_failure_to_error, 3, os.path.join(tmp_path, "time"))  # noqa: PTH118
    for rank in (0, 2):
        assert results[rank].get() < LIMIT_SECONDS


def _die(world: World, dying: int) -> None:
    rw.barrier()
    if world.rank == dying:
        kill_self()
    rw.all_reduce(torch.ones(3))


@pytest.mark.parametrize("dying", [1, 2])
def test_a_killed_rank_is_named(run_ranks: RunRanks, dying: int) -> None:
    results = run_ranks(_die, 3, dying)
    assert isinstance(results[dying].error, RankDied)
    assert results[dying].exit_code == -signal.SIGKILL
    for rank in {0, 1, 2} - {dying}:
        error = results[rank].error
        assert isinstance(error, PeerMissing)
        assert error.ranks == (dying,)


def _never_arrive(world: World) -> None:
    rw.barrier()
    if world.rank == 1:
        threading.Event().wait(6)
    rw.all_reduce(torch.ones(2, 3))


def test_a_rank_that_never_arrives_is_named_with_what_the_others_do(run_ranks: RunRanks) -> None:
    results = run_ranks(_never_arrive, 3, join_timeout_seconds=2.0, timeout_seconds=20.0)
    for rank in (0, 2):
        error = results[rank].error
        assert isinstance(error, PeerMissing), error
        assert error.ranks == (1,)
        text = str(error)
        assert 'all_reduce("sum", float32[2, 3])' in text
        assert "timed out after 2" in text
        assert "_never_arrive" in text, "says where the missing rank is"


def _stop(world: World) -> None:
    rw.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    rw.barrier()


def test_a_stopped_rank_is_named(run_ranks: RunRanks) -> None:
    results = run_ranks(_stop, 3, join_timeout_seconds=1.0, timeout_seconds=6.0)
    for rank in (0, 2):
        error = results[rank].error
        assert isinstance(error, PeerMissing)
        assert error.ranks == (1,)
        assert "no answer" in str(error)


def _leave_early(world: World) -> str:
    rw.barrier()
    if world.rank != 1:
        rw.all_reduce(torch.ones(1))
    return "left"


def test_a_rank_that_leaves_early_is_named(run_ranks: RunRanks) -> None:
    results = run_ranks(_leave_early, 3)
    assert results[1].get() == "left"
    for rank in (0, 2):
        error = results[rank].error
        assert isinstance(error, PeerMissing)
        assert error.ranks == (1,)
        assert "rank 1 has left" in str(error)


def _different_collectives(world: World, how: str) -> str:
    first = world.rank == 0
    with pytest.raises(CollectiveMismatch) as caught:  # noqa: PT012 - one of the calls
        if how == "kinds":
            rw.all_reduce(torch.ones(4)) if first else rw.barrier()
        elif how == "dtypes":
            rw.all_reduce(1 if first else 1.0)
        else:
            rw.all_gather(torch.ones(3 if first else 4))
    assert rw.all_reduce(1) == world.world_size, "nothing was sent, and the group goes on"
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "rank_0", "others"),
    [
        ("kinds", 'all_reduce("sum", float32[4])', "barrier()"),
        ("dtypes", "int64[]", "float64[]"),
        ("shapes", "float32[3]", "float32[4]"),
    ],
)
def test_different_collectives_are_distinguished(run_ranks: RunRanks, how: str, rank_0: str, others: str) -> None:
    for result in run_ranks(_different_collectives, 3, how):
        evidence = result.get().splitlines()
        assert any("rank 0: " in line and rank_0 in line for line in evidence)
        assert any("ranks 1-2: " in line and others in line for line in evidence)


def _agree(world: World, failing: int) -> str:
    try:
        with agreement.all_ranks_succeed("preparing data"):
            if world.rank == failing:
                (Path("/") / "no such folder").read_bytes()
    except FileNotFoundError:
        first = "own"
    except PeerFailed as error:
        first = f"peer {error.rank}"
        assert "no such folder" in str(error)
        assert "preparing data" in str(error)
    total = rw.all_reduce(1)
    return f"{first}, still {total} together"


@pytest.mark.parametrize("failing", [0, 2])
def test_agreement_raises_one_ranks_error_on_all_ranks_and_continues(run_ranks: RunRanks, failing: int) -> None:
    values = [result.get() for result in run_ranks(_agree, 3, failing)]
    expected = [f"{'own' if rank == failing else f'peer {failing}'}, still 3 together" for rank in range(3)]
    assert values == expected


def _local_rank_zero_first(world: World, path: str) -> bool:
    with agreement.local_rank_zero_first("making the file"):
        existed = os.path.exists(path)  # noqa: PTH110
        if world.rank == 0:
            with open(path, "w", encoding="utf-8"):  # noqa: PTH123
                pass
    return existed


def test_rank_zero_goes_first(run_ranks: RunRanks, tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "made")  # noqa: PTH118
    assert [r.get() for r in run_ranks(_local_rank_zero_first, 3, path)] == [False, True, True]


def _same(world: World) -> None:
    agreement.same_on_all_ranks(
        "the seed", 5 if world.rank < 2 else 6, do="pass the same seed", error=ConfigurationError
    )


def test_a_value_that_differs_is_an_error_with_the_ranks_folded(run_ranks: RunRanks) -> None:
    for result in run_ranks(_same, 3):
        assert isinstance(result.error, ConfigurationError)
        assert "ranks 0-1: 5" in str(result.error)
        assert "rank 2: 6" in str(result.error)
