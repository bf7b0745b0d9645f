# SPDX-License-Identifier: Apache-2.0
"""The pending operations of this rank in shared memory, advanced whenever it waits for any of them.

No thread moves tensors in the background: an operation is a generator that yields what it waits for. While a
rank waits for one, it advances all, so that ranks may wait for them in different orders.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Protocol

from rankwise.errors import RankwiseError
from rankwise.health.collective_timeout import SLICE_SECONDS, CollectiveWait, PeerEnded

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from rankwise.comm.backends.counters import Counters
    from rankwise.health.failure_detector import FailureDetector
    from rankwise.health.flight_recorder import Ticket
    from rankwise.health.process_probe import Peers

SPIN_SECONDS = 50e-6
YIELD_SECONDS = 150e-6
LOOK_SECONDS = 0.1
"""How long a rank sleeps before it checks whether the one it waits for is alive."""
OTHERS_SECONDS = 0.001
"""The same, if it has other operations to advance meanwhile."""


class Awaited(Protocol):
    """A condition that an operation waits for."""

    def is_met(self) -> bool:
        """Return whether it is met."""
        ...

    def sleep(self, seconds: float) -> None:
        """Sleep until it may be met, for at most ``seconds``."""
        ...

    def rank(self) -> int | None:
        """Return a rank of this host that it depends on."""
        ...


class Until:
    """Waits until every rank of this host has reached a value."""

    __slots__ = ("_counters", "_value")

    def __init__(self, counters: Counters, value: int) -> None:
        self._counters = counters
        self._value = value

    def is_met(self) -> bool:
        """Return whether all have reached it."""
        return self._counters.reach(self._value)

    def sleep(self, seconds: float) -> None:
        """Sleep until one of the last ranks advances."""
        self._counters.sleep_until(self._value, seconds)

    def rank(self) -> int | None:
        """Return one of the last ranks."""
        return self._counters.last(self._value)


class Operation:
    """A pending operation."""

    __slots__ = ("awaited", "is_done", "steps")

    def __init__(self, steps: Generator[Awaited]) -> None:
        self.steps = steps
        self.awaited: Awaited | None = None
        self.is_done = False

    def advance(self) -> None:
        """Advance as far as possible without waiting."""
        while self.awaited is None or self.awaited.is_met():
            self.awaited = next(self.steps, None)
            if self.awaited is None:
                self.is_done = True
                return


class Engine:
    """All operations of this rank."""

    def __init__(self, detector: FailureDetector, peers: Peers, moves_with: Engine | None = None) -> None:
        self.peers = peers
        self.detector = detector
        self._active: list[Operation] = [] if moves_with is None else moves_with._active  # noqa: SLF001 - its own kind
        self._moving = threading.RLock() if moves_with is None else moves_with._moving  # noqa: SLF001 - its own kind
        # If there are more ranks than cores, a rank that spins takes the core of one that works.
        crowded = len(peers) > len(os.sched_getaffinity(0))
        self._spin_seconds = 0.0 if crowded else SPIN_SECONDS

    def subset(self, ranks: Sequence[int]) -> Engine:
        """Return an engine for operations of some ranks of this host, which also advances this engine's operations."""
        return Engine(self.detector, self.peers.subset(ranks), moves_with=self)

    def start(self, steps: Generator[Awaited]) -> Operation:
        """Begin an operation, and advance it as far as possible without waiting."""
        operation = Operation(steps)
        self._active.append(operation)
        self.advance()
        return operation

    def advance(self) -> None:
        """Advance every operation that can advance."""
        with self._moving:
            for operation in tuple(self._active):
                try:
                    operation.advance()
                except BaseException as error:
                    operation.is_done = True
                    self._active.remove(operation)
                    if not isinstance(error, Exception):
                        self._forbid_more()
                    raise
                if operation.is_done:
                    self._active.remove(operation)

    def _forbid_more(self) -> None:
        # Half a step is done, but the others rely on all of it.
        self.detector.refuse_all(
            RankwiseError(
                "This rank was interrupted in the middle of a collective and cannot join another.",
                do="end the process; the other ranks are notified",
            )
        )

    def wait(self, operation: Operation, ticket: Ticket) -> None:
        """Return when ``operation`` is done. Raises as :class:`rankwise.health.collective_timeout.CollectiveWait`."""
        if operation.is_done:
            if ticket.ended is None:
                ticket.end()
            return
        with CollectiveWait(self.detector, ticket) as wait:
            while not self._is_done(operation, SLICE_SECONDS):
                wait.check()

    def _is_done(self, operation: Operation, seconds: float) -> bool:
        start = time.monotonic()
        while True:
            self.advance()
            if operation.is_done:
                return True
            spent = time.monotonic() - start
            if spent >= seconds:
                return False
            if spent < self._spin_seconds:
                continue
            if spent < self._spin_seconds + YIELD_SECONDS:
                os.sched_yield()
                continue
            self._sleep(operation, seconds - spent)

    def _sleep(self, operation: Operation, seconds: float) -> None:
        awaited = operation.awaited
        if awaited is None:
            return
        limit = LOOK_SECONDS if len(self._active) == 1 else OTHERS_SECONDS
        started = time.monotonic()
        awaited.sleep(min(seconds, limit))
        if time.monotonic() - started >= limit:
            self._check_alive(awaited)

    def _check_alive(self, awaited: Awaited) -> None:
        rank = awaited.rank()
        if rank is None or not self.peers.has_ended(rank):
            return
        # Its last update may have arrived between the two checks.
        if not awaited.is_met():
            raise PeerEnded(self.peers.world_rank(rank), self.peers.process(rank))
