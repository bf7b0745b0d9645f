# SPDX-License-Identifier: Apache-2.0
"""How ranks of one host wait for each other in shared memory: a counter per rank, and operations that wait for them.

No thread moves tensors in the background: an operation is a generator that yields what it waits for. While a
rank waits for one, it advances all, so that ranks may wait for them in different orders.

A rank that waits looks a few times before it sleeps, unless others want its core. It never yields:
sched_yield(2) gives up the rest of a time slice, and the next ones too if it is called again. Sleeping is built on
Linux's futex(2), called through the C library: Python offers no call for it. The kernel checks the word and puts the
caller to sleep in one step, so no wake-up is lost.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from rankwise.comm.backends.mapping import LINE_BYTES, WORD_BYTES
from rankwise.errors import RankwiseError
from rankwise.health.collective_timeout import SLICE_SECONDS, CollectiveWait, PeerEnded
from rankwise.health.diagnosis import is_of_a_signal_handler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rankwise.comm.backends.mapping import Mapping
    from rankwise.health.failure_detector import FailureDetector
    from rankwise.health.flight_recorder import Ticket
    from rankwise.health.process_probe import Peers


SPIN_SECONDS = 50e-6
"""How long a rank that waits keeps looking, if it has its core to itself: as long as being woken takes."""
ENGINE_CHECK_SECONDS = 0.1
"""How long a rank sleeps before it checks whether the one it waits for is alive."""
OTHERS_SECONDS = 0.001
"""The same, if it has other operations to advance meanwhile."""
CONTENDED_SHARE = 0.05
"""From which share of time on that a thread does not get its core the core is contended: next to one that always works
it is half. Threads of torch that wake now and then take less than a hundredth."""
READING_SECONDS = 0.05
"""How often the kernel is asked, at most: a reading takes 10 us."""
_STATISTICS = "/proc/self/schedstat"

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
        _syscall(SYSCALL_NUMBER, self._own_address, _WAKE, _EVERYONE, None, None, 0)

    def own(self) -> int:
        """Return this rank's counter."""
        return int(self._words[self._own])

    def reach(self, value: int) -> bool:
        """Return whether every other rank has reached ``value``."""
        words = self._words
        for _, place in self._others:  # noqa: SIM110 - without a generator: every wait asks several times
            if words[place] < value:
                return False
        return True

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


class Progress(Protocol):
    """The progress of other ranks, as :class:`Counters` show it."""

    def reach(self, value: int, /) -> bool:
        """Return whether all have reached ``value``."""
        ...

    def sleep_until(self, value: int, seconds: float, /) -> None:
        """Sleep until one that has not reached ``value`` advances, for at most ``seconds``."""
        ...

    def last(self, value: int, /) -> int | None:
        """Return a rank of this host that has not reached ``value``."""
        ...


Awaited: TypeAlias = tuple[Progress, int]
"""What an operation waits for: progress, and the value to be reached."""


@dataclass(slots=True, eq=False)
class Operation:
    """A pending operation."""

    steps: Iterator[Awaited]
    awaited: Awaited | None = None
    is_done: bool = False
    error: Exception | None = None
    """Why it failed; raised by the wait for it."""

    def fail(self, error: Exception) -> None:
        """End without a result."""
        self.is_done = True
        self.error = error


class Contention:
    """Whether others want the core of this process: loader workers, more ranks than cores, other jobs.

    The kernel counts how long the main thread was ready to run while another thread had its core. So nothing needs to
    know how many workers a loader has, who started them, and whether they have anything to do.
    """

    def __init__(self, statistics: str = _STATISTICS) -> None:
        self._statistics = statistics
        self._read_at = -math.inf
        self._delay = 0.0
        self._is_contended = False

    def is_contended(self, now: float) -> bool:
        """Return whether others wanted this core lately, as of ``now`` in seconds of a clock that never goes back."""
        elapsed = now - self._read_at
        if elapsed >= READING_SECONDS:
            delay = self._read()
            self._is_contended = delay - self._delay > CONTENDED_SHARE * elapsed
            self._read_at, self._delay = now, delay
        return self._is_contended

    def _read(self) -> float:
        """Return for how many seconds the main thread has waited for a core so far; always 0 where none counts them."""
        try:
            descriptor = os.open(self._statistics, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return 0.0
        try:
            return int(os.read(descriptor, 128).split()[1]) * 1e-9
        except (OSError, ValueError, IndexError):
            return 0.0
        finally:
            os.close(descriptor)


class Engine:
    """All operations of this rank."""

    def __init__(self, detector: FailureDetector, peers: Peers, moves_with: Engine | None = None) -> None:
        self.peers = peers
        self.detector = detector
        self._active: list[Operation] = [] if moves_with is None else moves_with._active  # noqa: SLF001 - its own kind
        self._failed: list[Operation] = [] if moves_with is None else moves_with._failed  # noqa: SLF001 - its own kind
        """Those whose error has not been raised."""
        self._moving = threading.RLock() if moves_with is None else moves_with._moving  # noqa: SLF001 - its own kind
        self._contention = Contention() if moves_with is None else moves_with._contention  # noqa: SLF001 - its own kind

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
        """Advance every operation as far as possible without waiting.

        Where one fails, its wait raises the error: what is done meanwhile may be no part of a collective.
        """
        with self._moving:
            for operation in tuple(self._active):
                awaited = operation.awaited
                try:
                    while awaited is None or awaited[0].reach(awaited[1]):
                        awaited = operation.awaited = next(operation.steps, None)
                        if awaited is None:
                            operation.is_done = True
                            break
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
        spin_seconds = None
        while True:
            self.advance()
            if operation.is_done or self._failed:
                self._raise_failure(operation)
            if operation.is_done:
                return True
            spent = time.monotonic() - start
            if spent >= seconds:
                return False
            if spin_seconds is None:
                # A rank that spins takes the core of a process that works.
                spin_seconds = 0.0 if self._contention.is_contended(start) else SPIN_SECONDS
            if spent >= spin_seconds:
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
        limit = ENGINE_CHECK_SECONDS if len(self._active) == 1 else OTHERS_SECONDS
        started = time.monotonic()
        progress, value = awaited
        progress.sleep_until(value, min(seconds, limit))
        rank = progress.last(value) if time.monotonic() - started >= limit else None
        # Its last update may have arrived between the two checks.
        if rank is not None and self.peers.has_ended(rank) and not progress.reach(value):
            raise PeerEnded(self.peers.world_rank(rank), self.peers.process(rank))


NUM_NUMBERS = LINE_BYTES // WORD_BYTES
_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory that the ranks of one host share."""

    mapping: Mapping
    engine: Engine
    local_rank: int
    ranks: list[int]
    """The world's numbers of the ranks of this host."""
    exchange_id: int


class Meeting:
    """Where the ranks of a host meet, in an order that is the same on all of them."""

    def __init__(self, memory: HostMemory, start: int, past: Callable[[int], RankwiseError]) -> None:
        """Take a part of the memory.

        Args:
            memory: of the ranks.
            start: the first byte of :meth:`num_bytes`, all of them zero.
            past: returns the error for a rank that has noted more progress than this rank, and is not here: it
                will not arrive.
        """
        num_ranks = len(memory.ranks)
        self._memory = memory
        self._words = memory.mapping.words
        self._counters = Counters(memory.mapping, start, memory.local_rank, num_ranks)
        lines = [start // WORD_BYTES + NUM_NUMBERS * line for line in range(4 * num_ranks)]
        self._numbers = lines[num_ranks : 2 * num_ranks], lines[2 * num_ranks : 3 * num_ranks]
        """In turn: a rank may be at the next meeting before the others have read the numbers of this one."""
        self._progress = lines[3 * num_ranks :]
        self._round = 0
        self._past = past

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        """Return how much memory it takes."""
        return 4 * LINE_BYTES * num_ranks

    def note_progress(self, number: int) -> None:
        """Note how far this rank has come elsewhere: a number that is the same on all ranks whenever they meet."""
        self._words[self._progress[self._memory.local_rank]] = number

    def meet(self, what: str, numbers: Sequence[int]) -> list[list[int]]:
        """Wait until every rank of the host is here; return the numbers of all, in the order of their local ranks.

        Called by: every rank of the host.

        Args:
            what: names the meeting in errors, on every rank alike.
            numbers: up to ``NUM_NUMBERS``, of up to 63 bits.

        Raises:
            PeerFailed, PeerMissing: a rank has failed, or does not arrive.
        """
        memory = self._memory
        self._round += 1
        places = self._numbers[self._round % 2]
        own = places[memory.local_rank]
        for place, number in enumerate(numbers, own):
            self._words[place] = number & _MASK
        ticket = memory.engine.detector.ticket(what, memory.exchange_id)
        self._counters.post(self._round)
        operation = memory.engine.start(iter(((_AllHere(self._counters, self._check_progress), self._round),)))
        memory.engine.wait(operation, ticket)
        return [self._words[place : place + len(numbers)].tolist() for place in places]

    def all_have_come(self, number: int) -> bool:
        """Return whether every rank has reached a meeting, counted from 1: others may have continued from there."""
        # Of this rank too, the memory tells: an interrupt may have come between any two lines.
        return self._counters.own() >= number and self._counters.reach(number)

    def _check_progress(self) -> None:
        own = self._words[self._progress[self._memory.local_rank]]
        for local_rank, place in enumerate(self._progress):
            # It notes its progress after it was here: first the one, then the other.
            if self._words[place] > own and not self._counters.reach(self._round):
                raise self._past(self._memory.ranks[local_rank])


class _AllHere:
    """The progress of the ranks of the host, unless one can no longer arrive."""

    def __init__(self, counters: Counters, check: Callable[[], None]) -> None:
        self._counters, self._check = counters, check
        self.sleep_until, self.last = counters.sleep_until, counters.last

    def reach(self, value: int) -> bool:
        """Return whether all have arrived. Raises if one can no longer arrive."""
        if self._counters.reach(value):
            return True
        self._check()
        return False
