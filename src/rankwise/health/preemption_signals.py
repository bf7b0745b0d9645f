# SPDX-License-Identifier: Apache-2.0
"""Signals that mean "stop soon", for a rank without an agent to receive them: Slurm's before its time limit.

A handler sets a flag and calls the previous handler. Never ends a rank that has something to save.
Used by ``join``.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

from rankwise.health.preemption import warn_nothing_to_save

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from rankwise.health.preemption import Preemption

INSISTENT = 3
"""The SIGTERM that ends a process at once: Slurm itself sends two before SIGKILL."""


def listen(preemption: Preemption, names: Sequence[str]) -> Callable[[], None]:
    """Have signals ask for a stop; return a function that restores the old handlers.

    A signal that is ignored remains ignored. A handler that the script installs later replaces this
    one. Does nothing off the main thread, where Python allows no handlers.

    Args:
        preemption: of the session.
        names: of the signals, ``"SIGUSR2"``.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    preemption.accept_signals(names)
    listeners = [_Listener(preemption, signal.Signals[name]) for name in names]

    def restore() -> None:
        for listener in listeners:
            listener.restore()

    return restore


class _Listener:
    """One signal, from join to leave."""

    def __init__(self, preemption: Preemption, number: signal.Signals) -> None:
        self._preemption = preemption
        self._number = number
        self._num_received = 0
        self._before = signal.getsignal(number)
        # None: not installed by Python code, and cannot be called from here.
        self._is_ours = self._before not in {signal.SIG_IGN, None}
        if self._is_ours:
            signal.signal(number, self._handle)

    def restore(self) -> None:
        if self._is_ours and signal.getsignal(self._number) == self._handle:
            signal.signal(self._number, self._before)
        self._is_ours = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first = not self._preemption.was_asked
        self._num_received += 1
        is_insistent = not self._preemption.will_notice or self._num_received >= INSISTENT
        if self._number is signal.SIGTERM and self._before is signal.SIG_DFL and is_insistent:
            # Waiting would be pointless: the process ends as it would without rankwise.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._preemption.ask(self._number.name)
        if is_first and not self._preemption.will_notice:
            # In a thread: the main one may be in the middle of printing.
            threading.Thread(target=warn_nothing_to_save, name="rankwise-stop").start()
        if callable(self._before):
            self._before(number, frame)
