# SPDX-License-Identifier: Apache-2.0
"""Waiting for a send or a receive of Gloo, while a thread looks whether it is in vain.

A wait of Gloo's that runs out of time closes the connection, and whether it is over cannot be asked: so it is made in
one piece, and a thread that finds a wait has become long takes it to the watch, and breaks it off for a reason. Used by
step.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING
from weakref import finalize, ref

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

    from rankwise.record import Ticket
    from rankwise.watch import Watch

LONG_SECONDS = 0.5
"""After how long a wait is looked at."""
LONGER_SECONDS = 60.0
"""By which Gloo waits longer than the watch, which knows more to say."""


class Waiter:
    """The waits of one rank, one at a time, and the thread that looks at them."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._limit = timedelta(seconds=watch.timeout_seconds + LONGER_SECONDS)
        self._wait: _Wait | None = None
        self._is_gone: threading.Event | None = None

    def wait(self, works: Sequence[dist.Work], ticket: Ticket, disconnect: Callable[[], None]) -> None:
        """Return when all of ``works`` are over.

        Args:
            works: sends and receives under way.
            ticket: of what they belong to.
            disconnect: has a wait for them end with an error. Called from another thread.

        Raises:
            PeerFailed, PeerMissing: as :meth:`rankwise.watch.Watch.wait`.
        """
        if self._is_gone is None:
            self._is_gone = threading.Event()
            looking = threading.Thread(
                target=_look, args=(ref(self), self._is_gone), name="rankwise-pipeline", daemon=True
            )
            looking.start()
            finalize(self, _end, self._is_gone, looking)
        own = self._wait = _Wait(ticket, disconnect)
        try:
            for work in works:
                work.wait(self._limit)
        except RuntimeError as error:
            own.is_over.set()
            with own.breaking:
                reason = own.reason
            if reason is not None:
                raise reason from None
            self._watch.wait(ticket, partial(_raise, error))
        finally:
            own.is_over.set()
            self._wait = None

    def look(self) -> None:
        """Take a wait that has become long to the watch, and stay until it is over. Called by: the thread."""
        own = self._wait
        if own is None or time.monotonic() - own.since < LONG_SECONDS:
            return
        try:
            self._watch.wait(own.ticket, own.is_over.wait)
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits
            with own.breaking:
                if not own.is_over.is_set():
                    own.reason = error
                    own.disconnect()


class _Wait:
    def __init__(self, ticket: Ticket, disconnect: Callable[[], None]) -> None:
        self.ticket = ticket
        self.disconnect = disconnect
        self.since = time.monotonic()
        self.is_over = threading.Event()
        self.breaking = threading.Lock()
        self.reason: Exception | None = None


def _raise(error: RuntimeError, _: float) -> bool:
    raise error


def _look(waiter_reference: ref[Waiter], is_gone: threading.Event) -> None:
    while not is_gone.wait(LONG_SECONDS):
        waiter = waiter_reference()
        if waiter is None:
            return
        waiter.look()
        del waiter


def _end(is_gone: threading.Event, looking: threading.Thread) -> None:
    is_gone.set()
    if looking is not threading.current_thread():
        looking.join(LONG_SECONDS)
