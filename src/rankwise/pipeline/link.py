# SPDX-License-Identifier: Apache-2.0
"""Sends and receives between the ranks of a pipeline, with waits that end when a peer fails.

Ranks of one host send through memory that they share, others through torch's group. A wait of Gloo cannot be polled,
and one that times out closes the connection. So each wait is one call, and a thread asks the failure detector about
long waits and aborts them for a reason. On a device the stream waits, and what is queued there is followed. Used by
executor.
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

from rankwise.comm.backends.mapping import PAGE_BYTES, rounded_up
from rankwise.comm.backends.ring import RingReceiver, RingSender, ring_bytes
from rankwise.comm.backends.shared_memory import SharedMemory
from rankwise.errors import fold_ranks, fold_values
from rankwise.health.collective_timeout import SLICE_SECONDS, CollectiveWait
from rankwise.health.queued_collectives import order_stream
from rankwise.log import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.health.failure_detector import FailureDetector
    from rankwise.health.flight_recorder import Ticket


@dataclass(frozen=True, slots=True)
class Transfer:
    """A send or a receive under way."""

    work: dist.Work | _Receiving
    rank: int
    """The other rank, in the world."""


@dataclass(frozen=True, slots=True)
class _Receiving:
    """A receive through shared memory."""

    ring: RingReceiver
    number: int


Rings = tuple[dict[int, "RingSender"], dict[int, "RingReceiver"]]
"""To each rank along the pipeline that this rank sends to, and from each that it receives from."""
NO_RINGS: Rings = ({}, {})
LEAST_RING_BYTES = 2**20
NUM_IN_RING = 2
"""How many micro-batches of the example's size fit: a stage may be ahead by one."""


def open_rings(
    world: Exchange | None, along: Exchange | None, pairs: Iterable[tuple[int, int]], sent_bytes: int
) -> Rings:
    """Open rings between the stages of a pipeline, if all ranks are on one host.

    Called by: every rank of ``along``.

    Args:
        world: the exchange of all ranks; ``None`` if stages also wait in collectives of torch. What does not fit into a
            ring yet is sent while its rank waits in shared memory, so it may wait nowhere else.
        along: the exchange of the ranks of this pipeline.
        pairs: the sender and the receiver of each, by their places along the pipeline.
        sent_bytes: what a stage sends for a micro-batch.
    """
    if not isinstance(world, SharedMemory) or len(world.hosts) > 1 or not isinstance(along, SharedMemory):
        return NO_RINGS
    capacity = rounded_up(max(NUM_IN_RING * sent_bytes, LEAST_RING_BYTES), PAGE_BYTES)
    places = {pair: PAGE_BYTES + number * ring_bytes(capacity) for number, pair in enumerate(sorted(pairs))}
    own_parts = [(start, ring_bytes(capacity)) for (sender, _), start in places.items() if sender == along.rank]
    end = PAGE_BYTES + len(places) * ring_bytes(capacity)
    memory, reasons = along.host_memory(end, own_parts)
    if memory is None:
        warn(f"stages send through Gloo: no shared memory of {end / 2**20:.0f} MiB\n{fold_values(reasons)}")
        return NO_RINGS
    to = {b: RingSender(memory, at, capacity, peer=b) for (a, b), at in places.items() if a == along.rank}
    from_ = {a: RingReceiver(memory, at, capacity, peer=a) for (a, b), at in places.items() if b == along.rank}
    return to, from_


class PipelineLink:
    """Sends and receives to the other ranks of a pipeline, watched by the failure detector."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        device: torch.device,
        detector: FailureDetector | None,
        rings: Rings = NO_RINGS,
    ) -> None:
        self.device = device
        self._group = group
        self._ranks = list(ranks)
        self._detector = detector
        self._exchange_id = 0 if detector is None else detector.recorder.new_exchange_id(ranks)
        self._to, self._from = rings
        self._ticket: Any = None
        self._sent: list[tuple[Transfer, torch.Tensor]] = []
        self._waiter: Waiter | None = None

    def begin(self, what: str) -> None:
        """Name the transfers that follow, for the error of a wait that does not end."""
        if self._detector is not None:
            self._ticket = self._detector.ticket(what, self._exchange_id)

    def send(self, tensor: torch.Tensor, place: int) -> None:
        """Start sending to the rank at ``place`` along the pipeline."""
        ring = self._to.get(place)
        if ring is not None and tensor.numel():
            ring.send(_flat(tensor))
            return
        started = self._start(dist.isend, tensor, place)
        if started is not None:
            self._sent.append((started, tensor))

    def receive(self, tensor: torch.Tensor, place: int) -> Transfer | None:
        """Start receiving into ``tensor``."""
        ring = self._from.get(place)
        if ring is not None and tensor.numel():
            return Transfer(_Receiving(ring, ring.receive(_flat(tensor))), self._ranks[place])
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
        ranks = sorted({one.rank for one in under_way})
        works: list[dist.Work] = []
        try:
            for one in under_way:
                if isinstance(one.work, _Receiving):
                    one.work.ring.wait(one.work.number, self._ticket)
                    self._ticket.resume()
                else:
                    works.append(one.work)
            if works:
                self._wait_for_torch(works, ranks)
        except Exception as error:
            error.add_note(f"waiting for {fold_ranks(ranks)}")
            raise

    def _wait_for_torch(self, works: Sequence[dist.Work], ranks: Sequence[int]) -> None:
        if self._detector is None:
            for work in works:
                work.wait()
        elif self._detector.queue is not None:
            for work in works:
                order_stream(self._detector, self._ticket, work)
        else:
            if self._waiter is None:
                self._waiter = Waiter(self._detector)
            self._waiter.wait(works, self._ticket, partial(self._disconnect, ranks))

    def _disconnect(self, ranks: Sequence[int]) -> None:
        # A wait of Gloo that times out closes the connection, which ends every other wait for it.
        for rank in ranks:
            with contextlib.suppress(RuntimeError):
                work = dist.irecv(torch.empty(1), rank, group=self._group)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))

    def finish(self) -> None:
        """Wait for all sends."""
        for ring in self._to.values():
            ring.finish(self._ticket)
            self._ticket.resume()
        self.wait([started for started, _ in self._sent])
        self._sent.clear()
        if self._to:
            self._ticket.end()


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
