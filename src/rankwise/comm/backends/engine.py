# SPDX-License-Identifier: Apache-2.0
"""How ranks of one host wait for each other in shared memory: a counter per rank, and operations that wait for them.

No thread moves tensors in the background: an operation is a generator that yields what it waits for. While a
rank waits for one, it advances all, so that ranks may wait for them in different orders.

Sleeping is built on Linux's futex(2), called through the C library: Python offers no call for it. The kernel checks
the word and puts the caller to sleep in one step, so no wake-up is lost.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
from typing import TYPE_CHECKING, Protocol

from rankwise.comm.backends.mapping import LINE_BYTES, WORD_BYTES
from rankwise.errors import RankwiseError
from rankwise.health.collective_timeout import SLICE_SECONDS, CollectiveWait, PeerEnded
from rankwise.health.diagnosis import is_of_a_signal_handler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.comm.backends.mapping import Mapping
    from rankwise.health.failure_detector import FailureDetector
    from rankwise.health.flight_recorder import Ticket
    from rankwise.health.process_probe import Peers

SPIN_SECONDS = 50e-6
YIELD_SECONDS = 150e-6
LOOK_SECONDS = 0.1
"""How long a rank sleeps before it checks whether the one it waits for is alive."""
OTHERS_SECONDS = 0.001
"""The same, if it has other operations to advance meanwhile."""

_SYSCALL_NUMBERS = {"x86_64": 202}
_WAIT = 0
_WAKE = 1
_EVERYONE = 2**31 - 1
SYSCALL_NUMBER = _SYSCALL_NUMBERS.get(platform.machine())


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_long,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_long,
)


def has_futex() -> bool:
    """Return whether this machine has futex, and orders stores as the shared memory here requires.

    x86-64 shows the stores of one core to every other in the order in which they were made. Others need
    fences, which Python cannot place.
    """
    return SYSCALL_NUMBER is not None and platform.system() == "Linux"


def sleep_while(address: int, value: int, seconds: float) -> None:
    """Sleep while the 32-bit word at ``address`` is ``value``, for at most ``seconds``. May return early."""
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _syscall(SYSCALL_NUMBER, address, _WAIT, value & 0xFFFFFFFF, ctypes.addressof(limit), None, 0)


def wake(address: int) -> None:
    """Wake every process that sleeps on the word at ``address``."""
    _syscall(SYSCALL_NUMBER, address, _WAKE, _EVERYONE, None, None, 0)


class Counters:
    """The progress of each rank of a host: counters that only grow."""

    def __init__(self, mapping: Mapping, start: int, rank: int, num_ranks: int) -> None:
        self._words = mapping.words
        places = [start + LINE_BYTES * other for other in range(num_ranks)]
        self._addresses = [mapping.address + place for place in places]
        self._own = places[rank] // WORD_BYTES
        self._own_address = self._addresses[rank]
        self._others = [(other, places[other] // WORD_BYTES) for other in range(num_ranks) if other != rank]

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        """Return how much memory the counters of ``num_ranks`` take."""
        return LINE_BYTES * num_ranks

    def post(self, value: int) -> None:
        """Advance this rank's counter and wake the ranks that sleep on it."""
        self._words[self._own] = value
        wake(self._own_address)

    def reach(self, value: int) -> bool:
        """Return whether every other rank has reached ``value``."""
        words = self._words
        return all(words[place] >= value for _, place in self._others)

    def last(self, value: int) -> int | None:
        """Return a rank of this host that has not reached ``value``."""
        return next((other for other, place in self._others if self._words[place] < value), None)

    def sleep_until(self, value: int, seconds: float) -> None:
        """Sleep until a rank that has not reached ``value`` advances, for at most ``seconds``."""
        for other, place in self._others:
            held = self._words[place]
            if held < value:
                sleep_while(self._addresses[other], held, seconds)
                return


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

    __slots__ = ("awaited", "error", "is_done", "steps")

    def __init__(self, steps: Iterator[Awaited]) -> None:
        self.steps = steps
        self.awaited: Awaited | None = None
        self.is_done = False
        self.error: Exception | None = None
        """Why it failed; raised by the wait for it."""

    def fail(self, error: Exception) -> None:
        """End without a result."""
        self.is_done = True
        self.error = error

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
        self._failed: list[Operation] = [] if moves_with is None else moves_with._failed  # noqa: SLF001 - its own kind
        """Those whose error has not been raised."""
        self._moving = threading.RLock() if moves_with is None else moves_with._moving  # noqa: SLF001 - its own kind
        # If there are more ranks than cores, a rank that spins takes the core of one that works.
        crowded = len(peers) > len(os.sched_getaffinity(0))
        self._spin_seconds = 0.0 if crowded else SPIN_SECONDS

    def subset(self, ranks: Sequence[int]) -> Engine:
        """Return an engine for operations of some ranks of this host, which also advances this engine's operations."""
        return Engine(self.detector, self.peers.subset(ranks), moves_with=self)

    def start(self, steps: Iterator[Awaited]) -> Operation:
        """Begin an operation, and advance it as far as possible without waiting."""
        operation = Operation(steps)
        self._active.append(operation)
        self.advance()
        return operation

    def advance(self) -> None:
        """Advance every operation that can advance.

        Where one fails, its wait raises the error: what is done meanwhile may be no part of a collective.
        """
        with self._moving:
            for operation in tuple(self._active):
                try:
                    operation.advance()
                except BaseException as error:
                    if not isinstance(error, Exception) or is_of_a_signal_handler(error):
                        operation.fail(self._forbid_more())
                        raise
                    operation.fail(error)
                    self._failed.append(operation)
                finally:
                    if operation.is_done:
                        self._active.remove(operation)

    def _forbid_more(self) -> RankwiseError:
        # Half a step is done, but the others rely on all of it.
        error = RankwiseError(
            "This rank was interrupted in the middle of a collective and cannot join another.",
            do="end the process; the other ranks are notified",
        )
        self.detector.refuse_all(error)
        return error

    def wait(self, operation: Operation, ticket: Ticket) -> None:
        """Return when ``operation`` is done. Raises as :class:`rankwise.health.collective_timeout.CollectiveWait`."""
        if operation.is_done and operation.error is None:
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
            self._raise_failure(operation)
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

    def _raise_failure(self, operation: Operation) -> None:
        """Raise the error of ``operation`` or, while it is pending, of another one that it may depend on."""
        failed = operation if operation.is_done else next(iter(self._failed), None)
        if failed is not None and failed.error is not None:
            if failed in self._failed:
                self._failed.remove(failed)
            raise failed.error

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
