# SPDX-License-Identifier: Apache-2.0
"""Signals to the launcher, turned into something its loop can wait for.

Before any process has been started a signal simply ends the launcher; afterwards it is handled in one
place, never in the middle of another operation. Imported by the launcher's start, the agent and ``ssh``.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from typing import TYPE_CHECKING

from rankwise.health.preemption import STOPPED_EXIT_CODE

if TYPE_CHECKING:
    from types import FrameType

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


def end_quietly() -> None:
    """Let a signal end this process at once, silently, while it has started nothing."""
    for number in HANDLED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end_now)


def _end_now(number: int, _frame: FrameType | None) -> None:
    # Asked to save while there is nothing to save: the job may still be started again.
    os._exit(STOPPED_EXIT_CODE if number == signal.SIGUSR2 else 128 + number)


class Interrupted(Exception):
    """A signal was received that ends this process's part of the job."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class PendingSignals:
    """The signals received so far. Replaces the handlers for the rest of the process."""

    def __init__(self) -> None:
        self._pending: deque[signal.Signals] = deque()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        for number in HANDLED:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)

    def fileno(self) -> int:
        """Return the descriptor that is readable when a signal has been received."""
        return self._reader

    def next_received(self) -> signal.Signals:
        """Return the next signal received."""
        os.read(self._reader, 1)
        return self._pending.popleft()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._pending.append(signal.Signals(number))
        os.write(self._writer, b"!")
