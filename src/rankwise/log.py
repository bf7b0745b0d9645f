# SPDX-License-Identifier: Apache-2.0
"""What rankwise logs: lines on standard error, from rank zero unless requested otherwise.

Holds one logger and adds no handler to any other; a line goes to the user's own logging
configuration where there is one, else to standard error.
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rankwise.world.environments.process import wants_no_color

if TYPE_CHECKING:
    from collections.abc import Generator

WARNING = "[rankwise] warning:"
RED, YELLOW = 31, 33
"""Colors of a terminal, as its escape sequences number them."""

logger = logging.getLogger("rankwise")


class _Speaker:
    """The rank that logs in this process."""

    prefix = ""
    is_rank_zero = True
    is_muted = False
    is_past_script = False


_speaker = _Speaker()


def speak_as(prefix: str, *, is_rank_zero: bool) -> None:
    """Set which rank this process logs as. Called when a world is joined and left."""
    _speaker.prefix = prefix
    _speaker.is_rank_zero = is_rank_zero


def is_rank_zero() -> bool:
    """Return whether this process logs as rank zero, as it does before it joins a world."""
    return _speaker.is_rank_zero


def rank_prefix() -> str:
    """Return which rank this process logs as, or an empty text where it is the only one."""
    return _speaker.prefix


@contextmanager
def muted() -> Generator[None]:
    """Log nothing inside the block: the work done there is not the user's."""
    before, _speaker.is_muted = _speaker.is_muted, True
    try:
        yield
    finally:
        _speaker.is_muted = before


@contextmanager
def past_the_script() -> Generator[None]:
    """Log to the process's standard error inside the block, whatever becomes of ``logging`` and ``sys.stderr``.

    For a script that does not know of rankwise: its log files hold what they hold without it.
    """
    before, _speaker.is_past_script = _speaker.is_past_script, True
    try:
        yield
    finally:
        _speaker.is_past_script = before


def colored(text: str, color: int, *, is_terminal: bool) -> str:
    """Return ``text`` in a color if it is for a terminal whose user has not set ``NO_COLOR``."""
    return f"\x1b[{color}m{text}\x1b[0m" if is_terminal and not wants_no_color() else text


def log(message: str, *, all_ranks: bool = False) -> None:
    """Log one line, on rank zero.

    Args:
        message: the line, without prefix.
        all_ranks: log it on every rank that calls, prefixed with the rank.
    """
    _emit(logging.INFO, message, all_ranks=all_ranks)


def warn(message: str, *, all_ranks: bool = False) -> None:
    """Log one warning, on rank zero unless ``all_ranks``."""
    _emit(logging.WARNING, message, all_ranks=all_ranks)


def _emit(level: int, message: str, *, all_ranks: bool) -> None:
    if _speaker.is_muted or level < logger.level or not (all_ranks or _speaker.is_rank_zero):
        return
    text = f"{_speaker.prefix} {message}" if all_ranks and _speaker.prefix else message
    stream = sys.stderr
    if _speaker.is_past_script:
        stream = sys.__stderr__ or sys.stderr
    elif logger.hasHandlers():
        logger.log(level, text)
        return
    head = "[rankwise]"
    if level >= logging.WARNING:
        head = colored(WARNING, YELLOW, is_terminal=hasattr(stream, "isatty") and stream.isatty())
    print(f"{head} {text}", file=stream, flush=True)
