# SPDX-License-Identifier: Apache-2.0
"""One line about the whole job while it runs: at the bottom of a terminal, else once a minute. Used by the agent.

In a terminal the lines above scroll as before, also those that rank zero writes, which do not pass the launcher.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

REDRAW_SECONDS = 0.5
LINE_SECONDS = 60.0
CLOSE_SECONDS = 2.0
"""How long the end waits for a text that is being made."""
_SAVE, _RESTORE, _CLEAR = "\x1b7", "\x1b8", "\x1b[2K"


class StatusLine:
    """The line, until closed.

    Args:
        describe: returns the text, without its end; empty while there is nothing to tell. Called in a thread: it may
            read files and wait for other machines.
    """

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe
        self._is_terminal = sys.stderr.isatty()
        self._next = 0.0
        self._size: os.terminal_size | None = None
        """Of the terminal, once its last line is kept for this."""
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        """What shows the text now, or showed it last."""

    def update(self, now: float) -> None:
        """Show the text if it is due, without blocking the caller."""
        if (self._thread is None or not self._thread.is_alive()) and now >= self._next:
            self._thread = threading.Thread(target=self._show, name="rankwise-status", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Give the last line back to the terminal."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
        if self._size is not None:
            _write(f"{_SAVE}\x1b[r\x1b[{self._size.lines};1H{_CLEAR}{_RESTORE}")
            self._size = None

    def _show(self) -> None:
        text = self._describe()
        self._next = time.monotonic() + (LINE_SECONDS if text and not self._is_terminal else REDRAW_SECONDS)
        if not text or self._is_closed.is_set():
            return
        if self._is_terminal:
            self._draw(text)
        else:
            _write(f"[rankwise] {text}\n")

    def _draw(self, text: str) -> None:
        with contextlib.suppress(OSError):
            size = os.get_terminal_size(sys.stderr.fileno())
            start = ""
            if size != self._size:
                # An empty line first, so that the cursor is not on the last one, which no longer scrolls.
                start = f"\n{_SAVE}\x1b[1;{size.lines - 1}r{_RESTORE}\x1b[1A"
                self._size = size
            _write(f"{start}{_SAVE}\x1b[{size.lines};1H{_CLEAR}{text[: size.columns - 1]}{_RESTORE}")


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
