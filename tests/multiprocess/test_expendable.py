# SPDX-License-Identifier: Apache-2.0
"""Optional ranks, on real ranks without a launcher."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from typing import TYPE_CHECKING

import torch

import rankwise as rw
from rankwise import testing
from rankwise.comm.agreement import StoreRanks
from rankwise.comm.session import current
from rankwise.errors import PeerFailed, PeerMissing
from rankwise.health.event_log import Failed, post, post_expendable
from rankwise.testing import RankDied, kill_self

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from on_ranks import RunRanks

    from rankwise.comm.session import Session
    from rankwise.health.failure_detector import FailureDetector
    from rankwise.world.facts import World

EVENT_SECONDS = 20.0


def _without_rank_two(world: World) -> FailureDetector:
    """Declare all ranks but the first optional, and have rank 2 fail; return this rank's watch."""
    session = current()
    detector, store = session.detector, session.store
    assert detector is not None
    assert store is not None
    post_expendable(store, [1, 2, 3])
    rw.barrier()
    if world.rank == 2:
        message = "the batch is bad"
        raise ValueError(message)
    return detector


def _go_on(world: World) -> list[str]:
    """Lose two ranks; return which rank is named by each collective that they never came to."""
    pair, with_killed = rw.new_group([0, 1]), rw.new_group([0, 1, 3])
    detector = _without_rank_two(world)
    with detector.changed:
        assert detector.changed.wait_for(lambda: detector.departed(2), EVENT_SECONDS)
    rw.barrier(group=with_killed)
    if world.rank == 3:
        kill_self()
    named: list[str] = []
    # Nobody says that rank 3 was killed, but who waits for it finds out.
    for group in (with_killed, None, with_killed):
        try:
            rw.all_reduce(torch.ones(3), group=group)
        except PeerFailed as error:
            named.append(f"failed: {error.rank}, the batch is bad: {'the batch is bad' in str(error)}")
        except PeerMissing as error:
            named.append(f"missing: {error.ranks}")
    with detector.changed:
        assert detector.changed.wait_for(lambda: detector.departed(3), EVENT_SECONDS)
    assert detector.error is None, detector.error
    assert rw.all_reduce(1, group=pair) == 2, "who does not need them goes on"
    return named


def test_only_what_lost_ranks_never_came_to_raises(run_ranks: RunRanks) -> None:
    results = run_ranks(_go_on, 4)
    expected = ["missing: (3,)", "failed: 2, the batch is bad: True", "missing: (3,)"]
    assert [results[rank].get() for rank in (0, 1)] == [expected] * 2
    assert isinstance(results[2].error, ValueError)
    assert isinstance(results[3].error, RankDied)


def _lose_all(world: World) -> None:
    detector, store = current().detector, current().store
    assert detector is not None
    assert store is not None
    post_expendable(store, [1, 2])
    rw.barrier()
    if world.rank == 2:
        message = "the first one"
        raise ValueError(message)
    with detector.changed:
        assert detector.changed.wait_for(lambda: detector.departed(2), EVENT_SECONDS)
    if world.rank == 1:
        message = "the last one"
        raise ValueError(message)
    with detector.changed:
        assert detector.changed.wait_for(lambda: detector.error is not None, EVENT_SECONDS)
    rw.all_reduce(1, group=rw.new_group([0]))


def test_the_failure_of_the_last_one_is_everyones(run_ranks: RunRanks) -> None:
    error = run_ranks(_lose_all, 3)[0].error
    assert isinstance(error, PeerFailed)
    assert (error.rank, "the last one" in str(error)) == (1, True)


def _wait_for_who_failed(world: World) -> list[str]:
    detector = _without_rank_two(world)
    if world.rank == 3:
        rw.send(os.getpid(), to=0)
        rw.send(torch.ones(3, requires_grad=True), to=0)
        threading.Event().wait()
    lost: int | None = None
    if world.rank == 0:
        lost = rw.recv(3)
        assert lost is not None
        received = rw.recv(3)
        # As where a machine is lost: no connection ends, and only the launcher says that the rank is gone.
        os.kill(lost, signal.SIGSTOP)
        post(detector.store, Failed(3, "lost", "no word from host3"))
        # Nobody waits for these to come.
        received.sum().backward()
    with detector.changed:
        assert detector.changed.wait_for(lambda: detector.departed(2) and detector.departed(3), EVENT_SECONDS)
    try:
        return _waits_for_lost(current())
    finally:
        if lost is not None:
            os.kill(lost, signal.SIGKILL)


def _waits_for_lost(session: Session) -> list[str]:
    named: list[str] = []

    def try_to(wait: Callable[[], object]) -> None:
        try:
            wait()
        except PeerFailed as error:
            named.append(f"{error.rank}: {error.evidence.splitlines()[-1] if error.evidence else ''}")

    # What a thread saves in the background is confirmed so.
    confirming = threading.Thread(target=try_to, args=(lambda: _confirm_twice(session),))
    confirming.start()
    try_to(lambda: rw.recv(2))
    try_to(lambda: rw.recv(3))
    confirming.join()
    rw.leave()
    return sorted(named)


def _confirm_twice(session: Session) -> None:
    store = session.store
    assert store is not None
    ranks = StoreRanks(session, store.clone(), "a save")
    if session.world.rank == 0:
        # What ranks said before they failed counts.
        store.set("rankwise/checkpoint/a save/0/2", "[20]")
        store.set("rankwise/checkpoint/a save/0/3", "[30]")
    rank = session.world.rank
    assert ranks.confirm("writing", lambda: rank) == ([0, 1, 20, 30] if rank == 0 else [rank])
    ranks.confirm("renaming", lambda: None)


def test_waiting_for_a_failed_rank_raises_its_error() -> None:
    of_two = "2: ValueError: the batch is bad"
    for result in testing.run_ranks(_wait_for_who_failed, 4)[:2]:
        assert result.get() == [of_two, of_two, "3: no word from host3"]


def _leave_last(rank: int, url: str, told: Connection) -> None:
    with rw.join(init_method=url, rank=rank, world_size=3, timeout_seconds=600):
        store = current().store
        assert store is not None
        post_expendable(store, [1, 2])
        rw.barrier()
        if rank == 2:
            kill_self()
        if rank == 1:
            # Its own answer to the second time that rank 0, which has come to its end, asks who is there.
            store.get("rankwise/roll_calls/2/1", EVENT_SECONDS)
            told.send("the store is still served")


def test_the_rank_that_serves_the_store_leaves_after_those_that_live() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    ranks = [context.Process(target=_leave_last, args=(rank, url, sender)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    sender.close()
    for rank in ranks:
        # Rank 2 says nothing when it goes: rank 0 finds out, and does not wait for it until its limit.
        rank.join(EVENT_SECONDS)
    assert [rank.exitcode for rank in ranks] == [0, 0, -signal.SIGKILL]
    assert receiver.recv() == "the store is still served"
    receiver.close()
