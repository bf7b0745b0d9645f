# SPDX-License-Identifier: Apache-2.0
"""Sends and receives between the ranks of a pipeline, with waits that end when a peer fails.

A wait of Gloo cannot be polled, and one that times out closes the connection. So each wait is one call, and a thread
asks the failure detector about long waits and aborts them for a reason. On a device the stream waits, and what is
queued there is followed. Used by executor.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

import torch
import torch.distributed as dist

from rankwise.errors import fold_ranks
from rankwise.health.collective_timeout import SLICE_SECONDS, CollectiveWait
from rankwise.health.queued_collectives import order_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rankwise.health.failure_detector import FailureDetector
    from rankwise.health.flight_recorder import Ticket


@dataclass(frozen=True, slots=True)
class Transfer:
    """A send or a receive under way."""

    work: dist.Work
    rank: int
    """The other rank, in the world."""


class PipelineLink:
    """torch's sends and receives to the other ranks of a pipeline, watched by the failure detector."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        device: torch.device,
        detector: FailureDetector | None,
    ) -> None:
        self.device = device
        self._group = group
        self._ranks = list(ranks)
        self._detector = detector
        self._exchange_id = 0 if detector is None else detector.recorder.new_exchange_id(ranks)
        self._ticket: Any = None
        self._sent: list[tuple[Transfer, torch.Tensor]] = []
        self._waiter: Waiter | None = None

    def begin(self, what: str) -> None:
        """Name the transfers that follow, for the error of a wait that does not end."""
        if self._detector is not None:
            self._ticket = self._detector.ticket(what, self._exchange_id)

    def send(self, tensor: torch.Tensor, place: int) -> None:
        """Start sending to the rank at ``place`` along the pipeline."""
        started = self._start(dist.isend, tensor, place)
        if started is not None:
            self._sent.append((started, tensor))

    def receive(self, tensor: torch.Tensor, place: int) -> Transfer | None:
        """Start receiving into ``tensor``."""
        return self._start(dist.irecv, tensor, place)

    def _start(self, how: Callable[..., dist.Work | None], tensor: torch.Tensor, place: int) -> Transfer | None:
        if not tensor.numel():
            return None
        try:
            work = how(_flat(tensor), self._ranks[place], group=self._group)
        except RuntimeError:
            if self._detector is not None:
                # The connection is broken already: the failure of a peer explains it.
                with CollectiveWait(self._detector, self._ticket):
                    raise
            raise
        if work is None:
            return None
        if self._detector is not None and self._detector.queue is not None:
            self._detector.queue.add(self._ticket, work)
        return Transfer(work, self._ranks[place])

    def wait(self, started: Iterable[Transfer | None]) -> None:
        """Wait for transfers; raise the error that the failure detector finds if they will not complete."""
        under_way = [one for one in started if one is not None]
        if not under_way:
            return
        if self._detector is None:
            for one in under_way:
                one.work.wait()
            return
        if self._detector.queue is not None:
            for one in under_way:
                order_stream(self._detector, self._ticket, one.work)
            return
        ranks = sorted({one.rank for one in under_way})
        if self._waiter is None:
            self._waiter = Waiter(self._detector)
        try:
            self._waiter.wait([one.work for one in under_way], self._ticket, partial(self._disconnect, ranks))
        except Exception as error:
            error.add_note(f"waiting for {fold_ranks(ranks)}")
            raise

    def _disconnect(self, ranks: Sequence[int]) -> None:
        # A wait of Gloo that times out closes the connection, which ends every other wait for it.
        for rank in ranks:
            with contextlib.suppress(RuntimeError):
                work = dist.irecv(torch.empty(1), rank, group=self._group)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))

    def finish(self) -> None:
        """Wait for all sends."""
        self.wait([started for started, _ in self._sent])
        self._sent.clear()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous view of a tensor without gaps, as sends require."""
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


TRANSFER_CHECK_SECONDS = 0.5
"""A wait is checked after this time."""
GLOO_EXTRA_SECONDS = 60.0
"""Gloo waits longer than the failure detector, whose error says more, by this time."""


class Waiter:
    """The waits of one rank, one at a time, and the thread that checks them."""

    def __init__(self, detector: FailureDetector) -> None:
        self._detector = detector
        self._limit = timedelta(seconds=detector.timeout_seconds + GLOO_EXTRA_SECONDS)
        self._wait: _Wait | None = None
        self._has_ended: threading.Event | None = None

    def wait(self, works: Sequence[dist.Work], ticket: Ticket, disconnect: Callable[[], None]) -> None:
        """Wait for all of ``works``.

        Args:
            works: sends and receives that were started.
            ticket: names them.
            disconnect: makes a wait for them end with an error. Called from another thread.

        Raises:
            PeerFailed, PeerMissing: as :class:`rankwise.health.collective_timeout.CollectiveWait`.
        """
        if self._has_ended is None:
            self._has_ended = threading.Event()
            poller = threading.Thread(
                target=_poll, args=(ref(self), self._has_ended), name="rankwise-pipeline", daemon=True
            )
            poller.start()
            finalize(self, _end, self._has_ended, poller)
        own = self._wait = _Wait(ticket, disconnect)
        try:
            for work in works:
                work.wait(self._limit)
        except RuntimeError:
            own.is_over.set()
            with own.breaking:
                reason = own.reason
            if reason is not None:
                raise reason from None
            with CollectiveWait(self._detector, ticket):
                raise
        finally:
            own.is_over.set()
            self._wait = None

    def check(self) -> None:
        """Watch a long wait with the failure detector until it is over. Called by: the thread."""
        own = self._wait
        if own is None or time.monotonic() - own.since < TRANSFER_CHECK_SECONDS:
            return
        try:
            with CollectiveWait(self._detector, own.ticket) as wait:
                while not own.is_over.wait(SLICE_SECONDS):
                    wait.check()
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits
            with own.breaking:
                if not own.is_over.is_set():
                    own.reason = error
                    own.disconnect()


@dataclass(eq=False)
class _Wait:
    ticket: Ticket
    disconnect: Callable[[], None]
    since: float = field(default_factory=time.monotonic)
    is_over: threading.Event = field(default_factory=threading.Event)
    breaking: threading.Lock = field(default_factory=threading.Lock)
    reason: Exception | None = None


def _poll(waiter_reference: ref[Waiter], has_ended: threading.Event) -> None:
    while not has_ended.wait(TRANSFER_CHECK_SECONDS):
        waiter = waiter_reference()
        if waiter is None:
            return
        waiter.check()
        del waiter


def _end(has_ended: threading.Event, poller: threading.Thread) -> None:
    has_ended.set()
    if poller is not threading.current_thread():
        poller.join(TRANSFER_CHECK_SECONDS)
