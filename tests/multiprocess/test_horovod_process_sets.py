# SPDX-License-Identifier: Apache-2.0
"""Process sets are independent: ranks wait only for members of an operation's set.

A rank that would be waited for wrongly blocks on a pipe that only the waiting rank writes to: that would never end.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from process_sets import total

import rankwise.compat.horovod as hvd
from rankwise import testing
from rankwise.compat.horovod import set_log
from rankwise.compat.horovod.queue import current_queue
from rankwise.errors import PeerFailed, PeerMissing

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World


@pytest.fixture
def pipes(tmp_path: Path) -> list[str]:
    """Return named pipes: opening one blocks until another process opens the other end."""
    paths = [str(tmp_path / f"pipe-{number}") for number in range(4)]
    for path in paths:
        os.mkfifo(path)
    return paths


def let_go(pipe: str, text: str = "") -> None:
    """Let a rank go that is held by a pipe."""
    Path(pipe).write_text(text, encoding="utf-8")


def held(pipe: str) -> str:
    """Block until the pipe is written to."""
    return Path(pipe).read_text(encoding="utf-8")


# -- no rank waits for another set -----------------------------------------------------------------


def _quick_and_slow(world: World, pipes: list[str]) -> list[float]:
    quick, slow = hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])
    hvd.init(process_sets=[quick, slow])
    own = quick if quick.included() else slow
    if world.rank == 3:
        # Rank 2 waits for this one, in an operation of their set.
        held(pipes[0])
    results = [total(world.rank + number, f"x{number}", own) for number in range(10 if own is quick else 1)]
    if world.rank == 0:
        let_go(pipes[0])
    return [*results, total(world.rank, "of all")]


def test_a_quick_set_does_not_wait_for_a_slow_one(run_ranks: RunRanks, pipes: list[str]) -> None:
    results = [result.get() for result in run_ranks(_quick_and_slow, 4, pipes)]
    assert results[0] == results[1] == [*(1.0 + 2 * number for number in range(10)), 6.0]
    assert results[2] == results[3] == [5.0, 6.0]


def _alone(world: World, pipes: list[str]) -> list[float]:
    hvd.init()
    alone, others = hvd.add_process_set([0]), hvd.add_process_set([1, 2])
    if world.rank:
        held(pipes[world.rank])
        result = [total(world.rank, "x", others)]
    else:
        result = [total(number, "x", alone) for number in range(10)]
        rows = hvd.allgather(torch.ones(2, 3), process_set=alone)
        handle = hvd.broadcast_async(rows, 0, process_set=alone)
        assert hvd.poll(handle)
        assert hvd.synchronize(handle).equal(rows)
        hvd.barrier(process_set=alone)
        with pytest.raises(ValueError, match="got root_rank=1"):
            hvd.broadcast(rows, 1, process_set=alone)
        for number in (1, 2):
            let_go(pipes[number])
    return [*result, total(world.rank, "of all")]


def test_a_set_of_one_rank_does_not_wait(run_ranks: RunRanks, pipes: list[str]) -> None:
    results = [result.get() for result in run_ranks(_alone, 3, pipes)]
    assert results == [[*map(float, range(10)), 3.0], [3.0, 3.0], [3.0, 3.0]]


def _only_sets_of_one_rank(world: World, pipes: list[str]) -> tuple[float, bool]:
    hvd.init()
    sets = [hvd.add_process_set([rank]) for rank in range(2)]
    if world.rank:
        held(pipes[0])
    result = total(3 + world.rank, "x", sets[world.rank])
    if not world.rank:
        let_go(pipes[0])
    # The world's operations meet in rounds, as without process sets.
    return result + total(1.0, "of all"), current_queue().log is None


def test_sets_of_one_rank_cost_the_others_nothing(pipes: list[str]) -> None:
    results = [result.get() for result in testing.run_ranks(_only_sets_of_one_rank, 2, pipes)]
    assert results == [(5.0, True), (6.0, True)]


# -- sets that have ranks in common ----------------------------------------------------------------


def _in_a_ring(world: World) -> list[list[float]]:
    pairs = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2]), hvd.ProcessSet([0, 2])]
    hvd.init(process_sets=pairs)
    own = [pair for pair in pairs if pair.included()]
    results = []
    for step in range(20):
        sets = [*own, hvd.global_process_set]
        # Each rank submits in another order, and waits first for what another rank waits for last.
        start = (world.rank + step) % 3
        order = [sets[(start + number) % 3] for number in range(3)]
        handles = {
            one.process_set_id: hvd.allreduce_async(
                torch.full((5,), float(world.rank + step)), op=hvd.Sum, name=f"x{step}", process_set=one
            )
            for one in order
        }
        waits = sets if world.rank != 1 else list(reversed(sets))
        got = {one.process_set_id: hvd.synchronize(handles[one.process_set_id]) for one in waits}
        assert all(bool((result == result[0]).all()) for result in got.values())
        results.append([got[one.process_set_id][0].item() for one in sets])
    return results


def test_sets_that_overlap_do_not_block_each_other(run_ranks: RunRanks) -> None:
    pairs = {0: [(0, 1), (0, 2)], 1: [(0, 1), (1, 2)], 2: [(1, 2), (0, 2)]}
    for rank, result in enumerate(run_ranks(_in_a_ring, 3)):
        expected = [[float(sum(r + step for r in ranks)) for ranks in [*pairs[rank], (0, 1, 2)]] for step in range(20)]
        assert result.get() == expected


def _waits_in_one_set_while_another_computes(world: World, pipes: list[str]) -> list[float]:
    first, second = hvd.ProcessSet([0, 1]), hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[first, second])
    if world.rank == 2:
        handle = hvd.allreduce_async(torch.tensor([2.0]), op=hvd.Sum, name="late", process_set=second)
        # Rank 0 has asked for the same, and waits for others meanwhile.
        held(pipes[0])
        return [hvd.synchronize(handle).item()]
    if world.rank == 1:
        return [total(number, f"x{number}", first) for number in range(10)]
    handle = hvd.allreduce_async(torch.tensor([0.0]), op=hvd.Sum, name="late", process_set=second)
    results = [total(number, f"x{number}", first) for number in range(10)]
    let_go(pipes[0])
    return [*results, hvd.synchronize(handle).item()]


def test_a_rank_that_computes_is_waited_for_by_its_own_operations_only(run_ranks: RunRanks, pipes: list[str]) -> None:
    results = [result.get() for result in run_ranks(_waits_in_one_set_while_another_computes, 3, pipes)]
    sums = [2.0 * number for number in range(10)]
    assert results == [[*sums, 2.0], sums, [2.0]]


def _polls(world: World) -> tuple[bool, float]:
    own = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[own])
    if world.rank == 2:
        return True, total(0.0, "of all")
    handle = hvd.allreduce_async(torch.tensor([1.0]), op=hvd.Sum, name="polled", process_set=own)
    if world.rank == 1:
        # Rank 0 polls until this rank has called more operations than the one it polls.
        first = hvd.allreduce_async(torch.tensor([1.0]), op=hvd.Sum, name="first", process_set=own)
        while not hvd.poll(handle):
            pass
        done = hvd.synchronize(first).item() == 2.0
    else:
        while not hvd.poll(handle):
            pass
        done = total(1.0, "first", own) == 2.0
    return done, hvd.synchronize(handle).item() + total(0.0, "of all")


def test_ranks_that_poll_complete_their_operations(run_ranks: RunRanks) -> None:
    assert [result.get() for result in run_ranks(_polls, 3)] == [(True, 2.0), (True, 2.0), (True, 0.0)]


def _train(world: World, pipes: list[str]) -> list[float]:
    quick, slow = hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])
    hvd.init(process_sets=[quick, slow])
    own = quick if quick.included() else slow
    model = torch.nn.Linear(3, 1, bias=False).double()
    torch.nn.init.ones_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), named_parameters=model.named_parameters(), process_set=own
    )
    if world.rank == 3:
        held(pipes[0])
    for _ in range(4 if own is quick else 2):
        optimizer.zero_grad()
        (model(torch.ones(1, 3, dtype=torch.float64)) * world.rank).sum().backward()
        optimizer.step()
    if world.rank == 0:
        let_go(pipes[0])
    return model.weight.flatten().tolist()  # type: ignore[no-any-return]


def test_optimizers_of_two_sets_go_at_their_own_pace(run_ranks: RunRanks, pipes: list[str]) -> None:
    results = [result.get() for result in run_ranks(_train, 4, pipes)]
    assert results == [[1.0 - 4 * 0.25] * 3] * 2 + [[1.0 - 2 * 1.25] * 3] * 2


# -- errors concern the ranks of a set -------------------------------------------------------------


def _errors_within_a_set(world: World, pipes: list[str]) -> list[str]:
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    texts = []
    if world.rank == 2:
        held(pipes[0])
    else:
        beside = hvd.allreduce_async(torch.tensor([1.0]), op=hvd.Sum, name="beside", process_set=pair)
        for call in (
            lambda: hvd.allreduce(torch.ones(2 + world.rank), name="shape", process_set=pair),
            lambda: hvd.allreduce(torch.ones(1), name="ab"[world.rank], process_set=pair),
        ):
            with pytest.raises(hvd.HorovodInternalError) as caught:
                call()
            texts.append(str(caught.value))
        assert hvd.synchronize(beside).item() == 2.0, "the others are not concerned"
        if world.rank == 0:
            let_go(pipes[0])
    assert total(1.0, "of all") == 3.0
    return texts


def test_errors_name_ranks_of_the_set_and_stop_no_others(run_ranks: RunRanks, pipes: list[str]) -> None:
    first, second, outside = (result.get() for result in run_ranks(_errors_within_a_set, 3, pipes))
    assert first == second
    assert outside == []
    assert "'allreduce.shape' was called with different shapes" in first[0]
    assert "Ranks 0-1 cannot continue: waiting for an operation that another rank has not called" in first[1]
    assert "rank 0: waits for 'allreduce.a'" in first[1]
    assert "rank 1: waits for 'allreduce.b'" in first[1]
    assert "'allreduce.a' was not called on rank 1" in first[1]


def _in_a_circle(world: World, pipes: list[str]) -> str:
    pairs = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2]), hvd.ProcessSet([0, 2])]
    hvd.init(process_sets=[*pairs, hvd.ProcessSet([0, 1, 2])])
    if world.rank == 3:
        return held(pipes[0])
    # Each rank waits, in a set of two, for one that waits in another set.
    with pytest.raises(hvd.HorovodInternalError) as caught:
        total(1.0, "x", pairs[world.rank])
    if world.rank == 0:
        let_go(pipes[0])
    return str(caught.value)


def test_ranks_that_wait_for_each_other_across_sets_say_so(run_ranks: RunRanks, pipes: list[str]) -> None:
    *texts, outside = (result.get() for result in run_ranks(_in_a_circle, 4, pipes))
    assert outside == ""
    for text in texts:
        assert "Ranks 0-2 cannot continue" in text
        assert "'allreduce.x' was not called on rank 1" in text


def _ends_early(world: World) -> str:
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    if world.rank != 1:
        return ""
    with pytest.raises(hvd.HorovodInternalError) as caught:
        total(1.0, "x", pair)
    return str(caught.value)


def test_a_member_that_has_left_is_named(run_ranks: RunRanks) -> None:
    text = run_ranks(_ends_early, 3)[1].get()
    assert "Rank 1 cannot continue" in text
    assert "rank 0: has reached the end" in text
    assert "'allreduce.x' was not called on rank 0" in text


def _fails(world: World) -> str:
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    if world.rank == 0:
        message = "of rank 0"
        raise ValueError(message)
    with pytest.raises(PeerFailed, match="of rank 0") as caught:
        total(1.0, "x", pair if world.rank == 1 else hvd.global_process_set)
    return str(caught.value)


def test_a_member_that_fails_is_named(run_ranks: RunRanks) -> None:
    failed, *others = run_ranks(_fails, 3)
    with pytest.raises(ValueError, match="of rank 0"):
        failed.get()
    assert all("Rank 0 failed: ValueError" in other.get() for other in others)


def _never_calls(world: World, pipes: list[str]) -> str:
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    if world.rank == 1:
        return held(pipes[0])
    if world.rank == 0:
        with pytest.raises(PeerMissing) as caught:
            total(1.0, "x", pair)
        let_go(pipes[0])
        return str(caught.value)
    return ""


def test_a_member_that_never_calls_is_named_after_the_limit(pipes: list[str]) -> None:
    text = testing.run_ranks(_never_calls, 3, pipes, join_timeout_seconds=1.0)[0].get()
    assert "hvd.allreduce 'x' timed out after" in text
    assert "waiting for rank 1" in text
    assert "rank 1: not called yet" in text


class Stop(Exception):
    """Raised by a signal."""


def _is_interrupted(world: World, pipes: list[str]) -> list[float]:
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    if world.rank == 0:
        _signal_when_it_waits()
        with pytest.raises(Stop):
            hvd.allreduce(torch.tensor([100.0]), op=hvd.Sum, name="x", process_set=pair)
        let_go(pipes[0])
        # The other has called it when this rank calls it again.
        log = current_queue().log
        assert log is not None
        log._store.get(log._key(log._num_read + 1), 30.0)
    elif world.rank == 1:
        held(pipes[0])
    return [total(1.0, "x", pair), total(1.0, "y", pair)] if pair.included() else []


def _signal_when_it_waits() -> None:
    """Have this process signalled once, while it waits for an operation that the others know of."""
    log = current_queue().log
    assert log is not None
    read = log._next

    def stop(*_: object) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        raise Stop

    def signalled() -> bytes | None:
        log._next = read  # type: ignore[method-assign]
        signal.signal(signal.SIGUSR1, stop)
        os.kill(os.getpid(), signal.SIGUSR1)
        return read()

    log._next = signalled  # type: ignore[method-assign]


def test_an_operation_that_was_interrupted_is_withdrawn(run_ranks: RunRanks, pipes: list[str]) -> None:
    assert [result.get() for result in run_ranks(_is_interrupted, 3, pipes)] == [[2.0, 2.0], [2.0, 2.0], []]


# -- records of operations are deleted -------------------------------------------------------------


def _many(world: World, pipes: list[str]) -> tuple[int, float]:
    hvd.init()
    session = current_queue().session
    pair = hvd.add_process_set([0, 1])
    before = session.store.torch_store.num_keys() if session.store is not None else 0
    if pair.included():
        for number in range(3 * set_log.BATCH):
            total(number, "x", pair)
        if world.rank == 0:
            let_go(pipes[0])
        for number in range(6 * set_log.BATCH):
            total(number, "x", pair)
            if number % 50 == 49:
                total(number, "of all")
    else:
        # Far behind, this rank reads the others' events in batches, and finds all of them.
        held(pipes[0])
        for number in range(49, 6 * set_log.BATCH, 50):
            total(number, "of all")
    after = session.store.torch_store.num_keys() if session.store is not None else 0
    return after - before, total(1.0, "end")


def test_entries_that_every_rank_has_read_are_deleted(pipes: list[str]) -> None:
    for result in testing.run_ranks(_many, 3, pipes):
        num_keys, last = result.get()
        assert num_keys < 2 * 3 * 2 * set_log.BATCH
        assert last == 3.0
