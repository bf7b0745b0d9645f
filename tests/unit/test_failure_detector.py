# SPDX-License-Identifier: Apache-2.0
"""What a rank makes of another's end, and what it tells the others of it."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from event_followers import following, log_of

from rankwise.errors import PeerFailed, PeerMissing
from rankwise.health import collective_timeout, event_log, failure_detector, process_probe
from rankwise.health.collective_timeout import CollectiveWait, PeerEnded
from rankwise.health.flight_recorder import EVERYONE
from rankwise.health.process_probe import Process
from rankwise.store.client import Store

if TYPE_CHECKING:
    from rankwise.health.diagnosis import Answers


def test_operations_that_a_rank_joined_before_it_left_can_end() -> None:
    with following(event_log.Left(3, last=2, begun={EVERYONE: 2})) as detector:
        tickets = [detector.ticket("barrier()") for _ in range(3)]
        assert [detector.failure_blocking(ticket) for ticket in tickets[:2]] == [None, None]
        assert isinstance(detector.failure_blocking(tickets[2]), PeerMissing)


def test_groups_without_the_rank_that_left_continue() -> None:
    with following(event_log.Left(3, 0, 0)) as detector:
        with_it, without_it = (detector.recorder.new_exchange_id(ranks) for ranks in ([0, 3], [0, 1]))
        assert detector.failure_blocking(detector.ticket("barrier()", without_it)) is None
        assert isinstance(detector.failure_blocking(detector.ticket("barrier()", with_it)), PeerMissing)


def test_the_first_failure_after_many_departures_is_every_ranks_error() -> None:
    failed = event_log.Failed(9, "ValueError", "the batch is bad")
    with following(world_size=16) as detector:
        for rank in range(1, 9):
            event_log.post_departure(detector.store, event_log.Left(rank), 16)
        event_log.post_departure(detector.store, event_log.Left(15), 16)
        event_log.post_departure(detector.store, failed, 16)
        with detector.changed:
            assert detector.changed.wait_for(lambda: detector.error is not None, 20)
        assert isinstance(detector.error, PeerFailed)
        assert "the batch is bad" in str(detector.error)
        # All ranks read neither of the others that left, nor of more failures than the first.
        for rank in range(20, 30):
            event_log.post_departure(detector.store, replace(failed, rank=rank), 16)
        log = log_of(detector.store)
        assert [sum(isinstance(event, kind) for event in log) for kind in (event_log.Left, event_log.Failed)] == [8, 8]


def test_a_failure_that_only_its_key_tells_of_is_an_error() -> None:
    with following(*(event_log.Left(rank) for rank in range(1, 9)), world_size=16) as detector:
        group = detector.recorder.new_exchange_id([0, 9, 10])
        ticket = detector.ticket("barrier()", group)
        assert detector.failure_blocking(ticket) is None
        # As of a rank that is killed before it has posted the event.
        failed = {"kind": "Failed", "token": "", "rank": 9, "error_type": "ValueError", "text": "the batch is bad"}
        detector.store.set(event_log.departed_key(9), json.dumps(failed))
        assert detector.departed(9)
        assert isinstance(detector.error, PeerFailed)
        assert detector.failure_blocking(ticket) is detector.error


def test_departures_are_looked_up_soon_in_a_new_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "FIRST_LOOK_UP_SECONDS", 0.0)
    with following(*(event_log.Left(rank) for rank in range(1, 9)), world_size=16) as detector:
        group = detector.recorder.new_exchange_id([0, 9, 10])
        detector._look_up_seconds = 60.0
        assert detector.failure_blocking(detector.ticket("barrier()", group)) is None
        detector.store.add("rankwise/departed/number", 8)
        event_log.post_departure(detector.store, event_log.Left(9), 16)
        ticket = detector.ticket("barrier()", group)
        assert detector.failure_blocking(ticket) is None, "it was looked up a moment ago"
        detector.note_wait(ticket)
        assert isinstance(detector.failure_blocking(ticket), PeerMissing)
        detector.note_wait(None)


@pytest.mark.parametrize("is_listed_late", [True, False])
def test_a_departure_that_is_counted_and_not_listed_is_found(
    monkeypatch: pytest.MonkeyPatch, *, is_listed_late: bool
) -> None:
    monkeypatch.setattr(failure_detector, "FIRST_LOOK_UP_SECONDS", 0.0)
    with following(world_size=80) as detector:
        for rank in range(1, 9):
            event_log.post_departure(detector.store, event_log.Left(rank, begun={EVERYONE: 1}), 80)
        with detector.changed:
            assert detector.changed.wait_for(lambda: len(detector.departures) == 8, 20)
        ticket = detector.ticket("barrier()")
        left = json.dumps({"kind": "Left", "token": "", "rank": 9})
        if not is_listed_late:
            # As of a rank that is killed in between.
            detector.store.set(event_log.departed_key(9), left)
        detector.store.add(event_log.NUM_DEPARTED_KEY, 1)
        event_log.post_departure(detector.store, event_log.Left(10, begun={EVERYONE: 1}), 80)
        detector.note_wait(ticket)
        assert detector.failure_blocking(ticket) is None
        assert 10 in detector.departures
        if is_listed_late:
            detector.store.set(event_log.listed_key(9), left)
        detector.note_wait(ticket)
        error = detector.failure_blocking(ticket)
        assert isinstance(error, PeerMissing)
        assert error.ranks == (9,)
        detector.note_wait(None)


def test_a_rank_that_finds_a_process_ended_notifies_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_timeout, "EXPLANATION_SECONDS", 0.05)
    with following() as detector:
        with (
            pytest.raises(PeerMissing, match="17") as caught,
            CollectiveWait(detector, detector.ticket("barrier()")),
        ):
            raise PeerEnded(2, 17)
        assert caught.value.ranks == (2,)
        assert event_log.ProcessEnded(2, "barrier()", 17) in log_of(detector.store)


def test_a_rank_with_a_broken_connection_raises_what_another_rank_reported_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collective_timeout, "EXPLANATION_SECONDS", 0.05)
    broken = RuntimeError("Connection closed by peer")
    with following() as detector:

        def polled() -> Answers:
            event_log.post(detector.store, event_log.Failed(2, "ValueError", "the batch is bad"))
            monkeypatch.setattr(collective_timeout, "EXPLANATION_SECONDS", 20.0)
            return {}

        monkeypatch.setattr(detector, "poll_status", polled)
        with (
            pytest.raises(PeerFailed, match="the batch is bad"),
            detector.changed,  # the log is not read before this rank waits for that
            CollectiveWait(detector, detector.ticket("barrier()")),
        ):
            raise broken


def test_a_long_wait_counts_until_it_ends_and_only_in_the_thread_that_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_timeout, "LONG_SECONDS", -1.0)
    seen: list[int] = []
    with following() as detector:

        def wait(then: BaseException | None = None) -> None:
            with CollectiveWait(detector, detector.ticket("barrier()")) as waiting:
                waiting.check()
                waiting.check()
                seen.append(detector.store.add("rankwise/long_waits", 0))
                if then is not None:
                    raise then

        wait()
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        with pytest.raises(KeyboardInterrupt):
            wait(KeyboardInterrupt())
        assert (seen, detector.store.add("rankwise/long_waits", 0)) == ([1, 0, 1], 0)


def test_only_processes_of_this_machine_that_have_not_left_are_looked_at() -> None:
    store = Store(dist.HashStore())
    here = process_probe.this_process()
    for rank, host in enumerate([here.host, "another machine", "", here.host]):
        process_probe.introduce(store, rank, Process(host, os.getpid(), ""))
    process_probe.withdraw(store, 3)
    assert list(process_probe.probe_silent(store, range(5))) == [0]
    assert [process_probe.is_introduced(store, rank) for rank in (2, 3, 4)] == [True, False, False]
