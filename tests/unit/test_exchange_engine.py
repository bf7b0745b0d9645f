# SPDX-License-Identifier: Apache-2.0
"""What moves shared memory's operations on, and when it gives one up."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import Mock

import pytest

from rankwise.comm.backends import engine as engine_module
from rankwise.comm.backends.engine import ENGINE_CHECK_SECONDS, READING_SECONDS, SPIN_SECONDS, Contention, Engine
from rankwise.errors import RankwiseError
from rankwise.health.collective_timeout import PeerEnded
from rankwise.health.process_probe import Peers

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path


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


class Counted(Last):
    """The progress of another rank that arrives in this one's first sleep; counts how often this one looks before."""

    def __init__(self) -> None:
        super().__init__(comes_in_sleep=1)
        self.num_looks = 0

    def reach(self, value: int) -> bool:
        self.num_looks += not self.num_sleeps
        return super().reach(value)

    def sleep_until(self, _: int, seconds: float) -> None:
        del seconds
        self.num_sleeps += 1


def _looks_before_sleeping(monkeypatch: pytest.MonkeyPatch, engine: Engine, *, is_contended: bool) -> int:
    """Return how often a rank that waits looks before it sleeps, if it may spin for as long as 4.5 looks take."""
    monkeypatch.setattr(Contention, "is_contended", lambda *_: is_contended)
    clock = itertools.count(step=SPIN_SECONDS / 4.5)
    monkeypatch.setattr(engine_module, "time", Mock(monotonic=lambda: next(clock)))
    counted = Counted()
    operation = engine.start(_operation(counted))
    before = counted.num_looks
    assert engine._is_done(operation, 100 * ENGINE_CHECK_SECONDS)
    assert counted.num_sleeps == 1
    return counted.num_looks - before


def _refuse_to_yield() -> None:
    pytest.fail("a rank that waits gave up its time slice")


def test_a_rank_looks_a_few_times_before_it_sleeps_unless_others_want_its_core(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_yield", _refuse_to_yield)
    engine = _engine(peers)
    for one in (engine, engine.subset([0])):
        assert _looks_before_sleeping(monkeypatch, one, is_contended=False) == 5
        assert _looks_before_sleeping(monkeypatch, one, is_contended=True) == 1


def test_a_core_is_contended_while_its_thread_waits_for_it(tmp_path: Path) -> None:
    statistics = tmp_path / "schedstat"

    def note(waited_seconds: float) -> None:
        statistics.write_text(f"123456789 {waited_seconds * 1e9:.0f} 42\n", encoding="ascii")

    note(7.0)  # before the first reading: of no concern
    contention = Contention(str(statistics))
    assert not contention.is_contended(0.0)
    note(7.0 + 0.06 * READING_SECONDS)
    assert not contention.is_contended(0.5 * READING_SECONDS)  # read too lately
    assert contention.is_contended(READING_SECONDS)
    assert contention.is_contended(1.9 * READING_SECONDS)
    # As much again, but in twice the time.
    note(7.0 + 0.12 * READING_SECONDS)
    assert not contention.is_contended(3 * READING_SECONDS)


def test_where_the_kernel_does_not_count_no_core_is_contended(tmp_path: Path) -> None:
    contention = Contention(str(tmp_path / "missing"))
    assert not any(contention.is_contended(number * READING_SECONDS) for number in range(1, 10))


_NEXT_TO_ANOTHER = """
import os, time
from rankwise.comm.backends.engine import Contention

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
this = os.getpid()
other = os.fork()
if not other:
    while os.getppid() == this:
        pass
    os._exit(0)
contention = Contention()
while not contention.is_contended(time.monotonic()):
    pass
"""


def test_a_neighbour_that_always_works_is_noticed() -> None:
    subprocess.run([sys.executable, "-c", _NEXT_TO_ANOTHER], check=True, timeout=60)
