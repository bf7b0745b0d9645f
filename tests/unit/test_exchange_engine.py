# SPDX-License-Identifier: Apache-2.0
"""What moves shared memory's operations on, and when it gives one up."""

from __future__ import annotations

import os
import subprocess
import time
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import Mock

import pytest

from rankwise.comm.backends.engine import ENGINE_CHECK_SECONDS, Engine
from rankwise.errors import RankwiseError
from rankwise.health.collective_timeout import PeerEnded
from rankwise.health.process_probe import Peers

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator


@pytest.fixture
def peers() -> Iterator[Peers]:
    """This process, as rank 4 of the world, and one that has ended, as rank 5."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    found = Peers([4, 5], [os.getpid(), ended.pid])
    yield found
    found.close()


class Last:
    """The last word of another rank, which comes while this one sleeps for the n-th time, or never."""

    def __init__(self, comes_in_sleep: int | None) -> None:
        self.num_sleeps = 0
        self._comes_in_sleep = comes_in_sleep

    def reach(self, _: int) -> bool:
        return self._comes_in_sleep is not None and self.num_sleeps >= self._comes_in_sleep

    def sleep_until(self, _: int, seconds: float) -> None:
        time.sleep(seconds)
        self.num_sleeps += 1

    def last(self, _: int) -> int | None:
        return 1


def _operation(awaited: Last) -> Generator[Any]:
    yield awaited, 1


def _engine(peers: Peers) -> Engine:
    return Engine(cast("Any", None), peers)


def test_the_last_message_of_a_process_that_has_ended_counts(peers: Peers) -> None:
    engine, last = _engine(peers), Last(comes_in_sleep=1)
    # It came after this rank slept its time, and before it looked whether the other one is alive.
    assert engine._is_done(engine.start(_operation(last)), 100 * ENGINE_CHECK_SECONDS)
    assert last.num_sleeps == 1


def test_a_process_that_ended_without_a_last_message_is_given_up(peers: Peers) -> None:
    engine, last = _engine(peers), Last(comes_in_sleep=None)
    with pytest.raises(PeerEnded) as caught:
        engine._is_done(engine.start(_operation(last)), 100 * ENGINE_CHECK_SECONDS)
    assert last.num_sleeps == 1
    assert (caught.value.rank, caught.value.process) == (5, peers.process(1))


def _failing(words: str) -> Generator[Any]:
    yield Last(comes_in_sleep=0), 1
    raise RuntimeError(words)


def test_what_an_operation_fails_with_is_raised_by_its_wait(peers: Peers) -> None:
    engine = _engine(peers)
    failed = engine.start(_failing("gloo/transport"))  # as in a backward pass, which waits for nothing yet
    assert failed.is_done
    other = engine.start(_operation(Last(comes_in_sleep=0)))
    assert engine._is_done(other, ENGINE_CHECK_SECONDS)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="gloo/transport"):
            engine._is_done(failed, ENGINE_CHECK_SECONDS)


def test_a_wait_ends_with_the_failure_of_another_operation_that_it_may_depend_on(peers: Peers) -> None:
    engine, last = _engine(peers), Last(comes_in_sleep=1)
    failed = engine.start(_failing("gloo/transport"))
    pending = engine.start(_operation(last))
    with pytest.raises(RuntimeError, match="gloo/transport"):
        engine._is_done(pending, 100 * ENGINE_CHECK_SECONDS)
    assert last.num_sleeps == 0
    # It is over for the others once it has been raised, and never for its own wait.
    assert engine._is_done(pending, 100 * ENGINE_CHECK_SECONDS)
    with pytest.raises(RuntimeError, match="gloo/transport"):
        engine._is_done(failed, ENGINE_CHECK_SECONDS)


def test_an_interrupted_operation_gives_no_result_and_forbids_others(peers: Peers) -> None:
    detector = Mock()  # only told here what a real one keeps
    engine, started = Engine(detector, peers), Last(comes_in_sleep=1)

    def steps() -> Generator[Any]:
        yield started, 1
        raise KeyboardInterrupt

    operation = engine.start(steps())
    with pytest.raises(KeyboardInterrupt):
        engine._is_done(operation, 100 * ENGINE_CHECK_SECONDS)
    (refused,) = detector.refuse_all.call_args.args
    with pytest.raises(RankwiseError, match="interrupted in the middle"):
        engine._is_done(operation, ENGINE_CHECK_SECONDS)
    assert refused is operation.error


def test_a_barrier_that_is_reached_is_not_waited_for(peers: Peers) -> None:
    engine, met = _engine(peers), [Last(comes_in_sleep=0) for _ in range(3)]

    def steps() -> Generator[Any]:
        for last in met:
            yield last, 1

    assert engine.start(steps()).is_done
    assert [one.num_sleeps for one in met] == [0, 0, 0]
