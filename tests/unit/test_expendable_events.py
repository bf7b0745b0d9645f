# SPDX-License-Identifier: Apache-2.0
"""What a rank makes of the failure of one that may go, event by event: its error, its waits, its early stop."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch.distributed as dist
from event_followers import following, log_of

from rankwise.errors import PeerFailed, PeerMissing, RankwiseError
from rankwise.health import event_log
from rankwise.health.event_log import ConnectionBroke, Event, Expendable, Failed, ProcessEnded, StopAt, StopRequested
from rankwise.health.preemption import Preemption
from rankwise.store.client import Store, StoreLost

FAILED = Failed(2, "ValueError", "ValueError: boom")
ENDED = ProcessEnded(2, "barrier()", 17)
BROKEN = ConnectionBroke("", gone=[2], have_left=False, table="", reason="")


@pytest.mark.parametrize("event", [FAILED, ENDED, BROKEN], ids=lambda event: type(event).__name__)
def test_one_that_may_go_is_noted_and_only_what_it_never_came_to_raises(event: Event) -> None:
    with following([1, 2, 3], event) as detector:
        assert [detector.departed(rank) for rank in range(4)] == [False, False, True, False]
        assert (detector.error, detector.has_lost_ranks) == (None, True)
        with_it, without_it = (detector.recorder.new_exchange_id(ranks) for ranks in ([0, 2], [0, 1]))
        for exchange_id in (0, with_it):
            pointless = detector.failure_blocking(detector.ticket("barrier()", exchange_id))
            assert isinstance(pointless, PeerFailed | PeerMissing)
            assert (pointless.rank,) == (2,) if isinstance(pointless, PeerFailed) else pointless.ranks == (2,)
        assert detector.failure_blocking(detector.ticket("barrier()", without_it)) is None
        assert detector.error is None, "groups without it go on"


def test_one_that_fails_after_the_others_have_left_is_noted() -> None:
    with following([2, 3], event_log.Left(3), FAILED) as detector:
        assert (detector.error, detector.has_lost_ranks) == (None, True)


@pytest.mark.parametrize(
    "log",
    [
        pytest.param([FAILED], id="nothing declared"),
        pytest.param([FAILED, [1, 2, 3]], id="declared too late"),
        pytest.param([[1, 3], FAILED], id="others declared"),
        pytest.param([[2], FAILED], id="the only one"),
        pytest.param([[2, 3], replace(FAILED, rank=3), FAILED], id="the last one"),
        pytest.param([[2, 3], replace(BROKEN, gone=[1, 2])], id="with another"),
        pytest.param([[1, 2, 3], replace(BROKEN, gone=[])], id="nobody is gone"),
    ],
)
def test_any_other_failure_is_everyones_error(log: list[Event | list[int]]) -> None:
    with following(*log) as detector:
        assert isinstance(detector.error, RankwiseError)


def test_a_declaration_is_made_once_and_adds_to_the_one_before() -> None:
    store = Store(dist.HashStore())
    for ranks in ([2, 1], [1, 2], [2], [3]):
        event_log.post_expendable(store, ranks)
    assert log_of(store) == [Expendable([1, 2]), Expendable([1, 2, 3])]
    assert json.loads(store.get(event_log.EXPENDABLE_KEY, 1.0)) == [1, 2, 3]


class EndsAfterWrites(dist.HashStore):
    """Torch's store, to which the connection ends after so many writes."""

    def __init__(self, num_writes: int) -> None:
        super().__init__()
        self.num_writes = num_writes

    def set(self, key: str, value: str) -> None:
        self._count()
        super().set(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if expected != desired:
            self._count()
        return super().compare_set(key, expected, desired)

    def _count(self) -> None:
        if self.num_writes == 0:
            raise dist.DistNetworkError("Broken pipe")
        self.num_writes -= 1


def test_a_declaration_reaches_the_ranks_before_the_launcher() -> None:
    # The launcher would go on without ranks whose failure the others still take for the end of the job.
    connection = EndsAfterWrites(1)
    store = Store(connection)
    with pytest.raises(StoreLost):
        event_log.post_expendable(store, [1, 2])
    assert log_of(store) == [Expendable([1, 2])]
    assert not store.check(event_log.EXPENDABLE_KEY)
    connection.num_writes = 100
    event_log.post_expendable(store, [1, 2])
    assert json.loads(store.get(event_log.EXPENDABLE_KEY, 1.0)) == [1, 2]


class Rank:
    """One rank's part in stopping, which reads the log on request."""

    def __init__(self, store: Store, rank: int, num_passed: int) -> None:
        self.preemption = Preemption(rank=rank, world_size=3, store=store, timeout_seconds=5.0)
        self._store = store
        self._num_read = 0
        for _ in range(num_passed):
            assert not self.preemption.is_here()

    def read(self, number: int) -> None:
        """Take in as many events, as the watch does where rank 2 may go."""
        for event in log_of(self._store)[self._num_read : self._num_read + number]:
            self._num_read += 1
            self.preemption.read(self._store, event, self._num_read + 1)
            if isinstance(event, Failed):
                self.preemption.lose(self._store, event.rank, self._num_read + 1)


@pytest.mark.parametrize("order", sorted(set(itertools.permutations([0, 0, 1, 1]))))
@pytest.mark.parametrize("dies", ["before it is asked", "before it counts", "after it has counted"])
def test_all_that_are_there_agree_where_to_stop(dies: str, order: tuple[int, ...]) -> None:
    store = Store(dist.HashStore())
    ranks = [Rank(store, rank, num_passed) for rank, num_passed in enumerate([4, 5, 9])]
    if dies == "before it is asked":
        event_log.post(store, FAILED)
    event_log.post(store, StopRequested("the test"))
    if dies == "after it has counted":
        ranks[2].read(1)
    if dies != "before it is asked":
        event_log.post(store, FAILED)
    for rank in order:
        ranks[rank].read(1)
    (boundary,) = [event.boundary for event in log_of(store) if isinstance(event, StopAt)]
    # Whoever counts last may not have heard yet that the rank which has passed 9 is gone.
    assert boundary in ((6, 10) if dies == "after it has counted" else (6,))
    for rank, num_passed in zip(ranks[:2], [4, 5], strict=True):
        rank.read(9)
        assert [rank.preemption.is_here() for _ in range(7)].index(True) == boundary - num_passed - 1


def test_asynchronous_ranks_stop_alone_and_a_rank_without_steps_is_notified() -> None:
    store = Store(dist.HashStore())
    server, *workers = (Rank(store, rank, 0) for rank in range(3))
    server.preemption.be_passive()
    assert server.preemption.will_notice, "it is not told to save"
    for worker in workers:
        worker.preemption.stop_alone()
        assert not worker.preemption.is_here()
    workers[0].preemption.ask("the test")
    workers[0].preemption.is_here()
    assert not server.preemption.is_asked
    for rank in (server, *workers):
        rank.read(9)
    assert server.preemption.is_asked
    assert [worker.preemption.is_here() for worker in workers] == [True, True], "each at its own next boundary"
