# SPDX-License-Identifier: Apache-2.0
"""One line about the whole job while it runs: at the bottom of a terminal, else once a minute. Used by the agent.

In a terminal the lines above scroll as before, also those that rank zero writes, which do not pass the launcher.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

REDRAW_SECONDS = 0.5
LINE_SECONDS = 60.0
_SAVE, _RESTORE, _CLEAR = "\x1b7", "\x1b8", "\x1b[2K"


class StatusLine:
    """The line, until closed.

    Args:
        describe: returns the text, without its end; empty while there is nothing to tell.
    """

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe
        self._is_terminal = sys.stderr.isatty()
        self._next = 0.0
        self._size: os.terminal_size | None = None
        """Of the terminal, once its last line is kept for this."""

    def update(self, now: float) -> None:
        """Show the text if it is due."""
        if now < self._next:
            return
        self._next = now + (REDRAW_SECONDS if self._is_terminal else LINE_SECONDS)
        text = self._describe()
        if not text:
            self._next = now + REDRAW_SECONDS
        elif self._is_terminal:
            self._draw(text)
        else:
            _write(f"[rankwise] {text}\n")

    def close(self) -> None:
        """Give the last line back to the terminal."""
        if self._size is not None:
            _write(f"{_SAVE}\x1b[r\x1b[{self._size.lines};1H{_CLEAR}{_RESTORE}")
            self._size = None

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
