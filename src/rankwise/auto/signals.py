# SPDX-License-Identifier: Apache-2.0
"""Signal handlers of the script, which may raise: they wait for the end of a split call, as of torch's own."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from rankwise.auto.replacing import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import FrameType


class _Waiting(NamedTuple):
    """A handler as it is registered instead of the script's."""

    signals: HeldSignals
    handler: Callable[[int, FrameType | None], object]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.signals.depth:
            self.signals.arrived.append((number, self.handler))
        else:
            self.handler(number, frame)


class HeldSignals:
    """Holds back handlers inside a ``with`` block of it. Used by: the main thread."""

    def __init__(self) -> None:
        self.depth = 0
        self.arrived: list[tuple[int, Callable[[int, FrameType | None], object]]] = []

    @contextmanager
    def replacing(self) -> Generator[None]:
        """Be able to hold back the handlers there are, and those that the script sets inside the block."""
        set_handler, get_handler = signal.signal, signal.getsignal

        def set_waiting(number: int, handler: Any) -> Any:
            return _of_script(set_handler(number, _Waiting(self, handler) if callable(handler) else handler))

        before = {number: get_handler(number) for number in signal.valid_signals()}
        for number, handler in before.items():
            if callable(handler):
                set_waiting(number, handler)
        with replaced(
            (signal, ["signal"], lambda _: set_waiting),
            (signal, ["getsignal"], lambda _: lambda number: _of_script(get_handler(number))),
        ):
            yield

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if not self.depth:
            self._handle(sys._getframe(1))  # noqa: SLF001 - the documented name

    def _handle(self, frame: FrameType) -> None:
        """Run the handlers of the signals that have arrived, also those after one that raises."""
        if self.arrived:
            number, handler = self.arrived.pop(0)
            try:
                handler(number, frame)
            finally:
                self._handle(frame)


def _of_script(handler: Any) -> Any:
    return handler.handler if isinstance(handler, _Waiting) else handler
