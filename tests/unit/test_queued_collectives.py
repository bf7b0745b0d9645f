# SPDX-License-Identifier: Apache-2.0
"""Collectives on a device, for which the CPU does not wait: a thread follows them. With a stub in torch's place."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from event_followers import following

from rankwise.errors import PeerFailed, PeerMissing
from rankwise.health import event_log, queued_collectives
from rankwise.health.collective_timeout import CollectiveWait
from rankwise.health.failure_detector import raise_in_thread
from rankwise.health.flight_recorder import EVERYONE
from rankwise.health.queued_collectives import QueuedCollectives

if TYPE_CHECKING:
    from collections.abc import Generator

    from rankwise.health.failure_detector import FailureDetector

LIMIT_SECONDS = 20.0


class Device:
    """A device that runs collectives in order, one each time it is told to, until its communicator is aborted."""

    def __init__(self) -> None:
        self.num_queued = self.num_ended = 0
        self.has_failed = False
        self.is_aborted = threading.Event()

    def queue(self) -> Queued:
        self.num_queued += 1
        return Queued(self, self.num_queued)

    def synchronize(self) -> bool:
        """Return, when the device is idle or its communicator aborted, whether that was within the limit."""
        return self.num_queued == self.num_ended or self.is_aborted.wait(LIMIT_SECONDS)


class Queued:
    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number = device, number

    def is_completed(self) -> bool:
        return self.number <= self.device.num_ended or self.device.has_failed

    def wait(self) -> bool:
        if self.device.has_failed:
            raise RuntimeError("NCCL error: remote process exited")
        return True


@contextmanager
def queueing(detector: FailureDetector, device: Device) -> Generator[QueuedCollectives]:
    queue = QueuedCollectives(detector, prepare=lambda: None, abort=device.is_aborted.set)
    detector.follow_device_by(queue)
    try:
        yield queue
    finally:
        queue.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queued_collectives, "QUEUE_POLL_SECONDS", 0.01)
    monkeypatch.setattr(queued_collectives, "QUEUED_LONG_SECONDS", 0.0)


def test_what_has_completed_is_over_and_nothing_waits() -> None:
    device = Device()
    with following() as detector, queueing(detector, device) as queue:
        tickets = [detector.ticket("gradients") for _ in range(3)]
        for ticket in tickets:
            queue.add(ticket, device.queue())
        device.num_ended = 3
        queue.drain(device.synchronize)
        assert all(ticket.ended is not None for ticket in tickets)
        assert not device.is_aborted.is_set()


def test_a_failed_peer_ends_what_the_device_waits_for_and_is_raised_before_the_result_is_used() -> None:
    device = Device()
    with following() as detector, queueing(detector, device) as queue:
        queue.add(detector.ticket("gradients"), device.queue())
        event_log.post(detector.store, event_log.Failed(2, "ValueError", "the batch is bad"))
        used: list[bool] = []
        with pytest.raises(PeerFailed, match="Rank 2 failed: ValueError"):
            used.append(device.synchronize())
        assert used == []
        with pytest.raises(PeerFailed):
            detector.ticket("the next one")


def test_a_failure_of_a_peer_is_raised_once() -> None:
    device = Device()
    with following() as detector, queueing(detector, device) as queue:
        queue.add(detector.ticket("gradients"), device.queue())
        detector.note_raised()
        event_log.post(detector.store, event_log.Failed(2, "ValueError", "the batch is bad"))
        assert device.synchronize()


def test_results_that_have_arrived_are_used_although_a_peer_fails_afterwards() -> None:
    device = Device()
    with following() as detector, queueing(detector, device) as queue:
        queue.add(detector.ticket("gradients"), device.queue())
        device.num_ended = 1
        queue.drain(device.synchronize)
        event_log.post(detector.store, event_log.Failed(2, "ValueError", "the batch is bad"))
        assert device.is_aborted.wait(LIMIT_SECONDS)
        queue.drain(device.synchronize)


def test_a_peer_that_left_before_a_collective_is_named() -> None:
    device = Device()
    event = event_log.Left(3, 0, 0, {EVERYONE: 0})
    with following(event) as detector, queueing(detector, device) as queue:
        queue.add(detector.ticket("gradients"), device.queue())
        with pytest.raises(PeerMissing, match="gradients cannot complete: rank 3 has left"):
            device.synchronize()


def test_a_collective_that_is_not_reached_in_time_names_the_missing_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    with following() as detector, queueing(detector, device) as queue:
        monkeypatch.setattr(detector, "timeout_seconds", 0.05)
        answers = {rank: {"count": int(rank != 2), "waiting": rank != 2, "exchange": EVERYONE} for rank in range(4)}
        monkeypatch.setattr(
            detector,
            "poll_status",
            lambda *_: {
                rank: {**answer, "what": "gradients", "is_over": False, "at": "", "step": 1, "seconds": 1.0}
                for rank, answer in answers.items()
            },
        )
        queue.add(detector.ticket("gradients"), device.queue())
        with pytest.raises(PeerMissing, match=r"gradients timed out after .* s waiting for rank 2\."):
            device.synchronize()


def test_a_collective_that_failed_is_an_error_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(CollectiveWait, "_explain", lambda *_: PeerMissing("it broke", ranks=[1]))
    with following() as detector, queueing(detector, device) as queue:
        queue._queue.append((detector.ticket("gradients"), device.queue()))
        device.has_failed = True
        with pytest.raises(PeerMissing, match="it broke"):
            queue.add(detector.ticket("gradients"), device.queue())


def test_an_error_of_another_thread_is_the_very_same() -> None:
    error = PeerMissing("rank 1 exited", ranks=[1])
    with pytest.raises(PeerMissing) as caught:
        raise_in_thread(threading.get_ident(), error)
    assert caught.value is error


WITHDRAWS = f"""
import sys, threading
from rankwise.errors import PeerMissing
from rankwise.health.failure_detector import raise_in_thread

def raise_and_withdraw():
    raise_in_thread(threading.main_thread().ident, PeerMissing("rank 1 exited", ranks=[1]))
    raise_in_thread(threading.main_thread().ident, None)

# The interpreter switches between threads where it raises such errors, so the other one is given all the time.
sys.setswitchinterval({LIMIT_SECONDS})
thread = threading.Thread(target=raise_and_withdraw)
thread.start()
thread.join()
calls = []
sys.setprofile(lambda frame, *_: calls.append(frame.f_code.co_name))
(lambda: None)()
sys.setprofile(None)
print(*calls)
"""


def test_an_error_that_another_thread_has_withdrawn_is_not_raised_and_functions_can_be_profiled() -> None:
    done = subprocess.run([sys.executable, "-c", WITHDRAWS], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "<lambda> <lambda> <module>\n", "")
