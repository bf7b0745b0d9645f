# SPDX-License-Identifier: Apache-2.0
"""The collectives that this rank has queued on its device, followed by a thread until they complete.

On a device a collective's ``wait()`` orders a stream and returns; the CPU continues. So nothing waits that could notice
that a peer is dead: the thread does. It aborts the communicators then, which ends whatever the CPU waits for, and has
the training thread raise the reason before it can use results that never arrived.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from rankwise.errors import RankwiseError
from rankwise.health import diagnosis
from rankwise.health.collective_timeout import CollectiveWait
from rankwise.log import warn
from rankwise.store.client import StoreLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.health.failure_detector import FailureDetector
    from rankwise.health.flight_recorder import Ticket

QUEUE_POLL_SECONDS = 0.1
"""How often the thread checks what is queued."""
QUEUED_LONG_SECONDS = 1.0
"""The age from which it asks whether a collective has completed. The training thread asks about younger ones."""
QUEUE_END_SECONDS = 2.0
"""How long closing waits for the thread."""


class Work(Protocol):
    """torch's handle of a collective on a device."""

    def is_completed(self) -> bool:
        """Return whether it has completed or failed, without waiting."""
        ...

    def wait(self) -> bool:
        """Order the current stream after it; raise if it has failed."""
        ...


def order_stream(detector: FailureDetector, ticket: Ticket, work: Work) -> None:
    """Order the current stream after a collective; raise the reason if it has failed."""
    try:
        work.wait()
    except RuntimeError:
        with CollectiveWait(detector, ticket):
            raise


class QueuedCollectives:
    """What this rank has queued on its device, from join to leave.

    Args:
        detector: of this rank.
        prepare: prepares the calling thread for calls on the device.
        abort: aborts the communicators of this process, which ends what it waits for.
        is_capturing: whether the calling thread captures a graph, whose collectives only run when it is replayed.
    """

    def __init__(
        self,
        detector: FailureDetector,
        *,
        prepare: Callable[[], None],
        abort: Callable[[], None],
        is_capturing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._detector = detector
        self._prepare = prepare
        self._abort = abort
        self._is_capturing = is_capturing
        self._queue: deque[tuple[Ticket, Work]] = deque()
        self._retiring = threading.Lock()
        self._broken_peer: Callable[[], RankwiseError | None] = lambda: None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="rankwise-queued-collectives", daemon=True)
        self._thread.start()

    def watch_peer(self, broken: Callable[[], RankwiseError | None]) -> None:
        """Have the thread call ``broken``, which returns the error of a peer that has exited."""
        self._broken_peer = broken

    def add(self, ticket: Ticket, work: Work) -> None:
        """Follow a collective that has been queued.

        Raises:
            PeerFailed, PeerMissing: an earlier one has failed.
        """
        if self._is_capturing():
            # Those before it have completed: a capture begins with a synchronization.
            self._queue.clear()
            return
        self._retire()
        self._queue.append((ticket, work))

    def drain(self, synchronize: Callable[[], None]) -> None:
        """Return when everything queued has completed; ``synchronize`` waits for the device.

        Raises:
            PeerFailed, PeerMissing: it has not.
        """
        if self._queue:
            synchronize()
            self._retire()
        if self._queue:
            self._detector.raise_unraised()

    def close(self) -> None:
        """Stop the thread. Called on leaving the world, with or without an error."""
        self._detector.note_raised()
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(QUEUE_END_SECONDS)

    def _retire(self) -> None:
        """Forget the oldest collectives that have completed; raise the reason if one has failed."""
        with self._retiring:
            while self._queue and self._detector.error is None and self._queue[0][1].is_completed():
                ticket, work = self._queue[0]
                order_stream(self._detector, ticket, work)
                ticket.end()
                self._queue.popleft()

    # -- the thread --------------------------------------------------------------------------------

    def _follow(self) -> None:
        self._prepare()
        oldest: CollectiveWait | None = None
        try:
            while not self._closed.wait(QUEUE_POLL_SECONDS):
                oldest = self._check_oldest(oldest)
        except Exception as error:  # noqa: BLE001 - the training thread raises it
            self._give_up(error)

    def _check_oldest(self, oldest: CollectiveWait | None) -> CollectiveWait | None:
        """Check the oldest collective that is pending; return the wait for it, if it has lasted for some time."""
        error = self._detector.error or self._broken_peer()
        if error is not None:
            raise error
        if oldest is not None and time.monotonic() - oldest.ticket.since > QUEUED_LONG_SECONDS:
            self._retire()
        pending = next(iter(self._queue.copy()), None)
        if pending is None or oldest is None or oldest.ticket is not pending[0]:
            self._detector.note_queued(None)
            return None if pending is None else CollectiveWait(self._detector, pending[0], since=time.monotonic())
        if time.monotonic() - oldest.ticket.since > QUEUED_LONG_SECONDS:
            self._detector.note_queued(oldest.ticket)
        oldest.check()
        return oldest

    def _give_up(self, error: Exception) -> None:
        """Abort the communicators, and have the training thread raise ``error``."""
        if isinstance(error, StoreLost):
            error = diagnosis.store_lost(self._detector.world)
        if not isinstance(error, RankwiseError):
            warn(f"collectives on the device are no longer followed: {type(error).__name__}: {error}", all_ranks=True)
            return
        self._detector.fail_queued(error, are_pending=bool(self._queue) and not self._closed.is_set())
        self._abort()
