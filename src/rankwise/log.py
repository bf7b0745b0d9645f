# SPDX-License-Identifier: Apache-2.0
"""What rankwise says to a person: lines on standard error, from rank zero unless asked otherwise.

Holds one logger and adds no handler to anybody else's; a line goes to the user's own logging
configuration where there is one, else to standard error.
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

logger = logging.getLogger("rankwise")


class _Speaker:
    """Who speaks in this process."""

    prefix = ""
    is_rank_zero = True
    is_muted = False


_speaker = _Speaker()


def speak_as(prefix: str, *, is_rank_zero: bool) -> None:
    """Tell the log which rank this process is. Called when a world is joined and left."""
    _speaker.prefix = prefix
    _speaker.is_rank_zero = is_rank_zero


@contextmanager
def muted() -> Generator[None]:
    """Say nothing inside the block: what is done there is not the user's."""
    before, _speaker.is_muted = _speaker.is_muted, True
    try:
        yield
    finally:
        _speaker.is_muted = before


def log(message: str, *, all_ranks: bool = False) -> None:
    """Say one line, on rank zero.

    Args:
        message: the line, without prefix.
        all_ranks: say it on every rank that calls, with the rank before it.
    """
    _emit(logging.INFO, message, all_ranks=all_ranks)


def warn(message: str, *, all_ranks: bool = False) -> None:
    """Say one warning, on rank zero unless ``all_ranks``."""
    _emit(logging.WARNING, message, all_ranks=all_ranks)


def _emit(level: int, message: str, *, all_ranks: bool) -> None:
    if _speaker.is_muted or level < logger.level or not (all_ranks or _speaker.is_rank_zero):
        return
    text = f"{_speaker.prefix} {message}" if all_ranks and _speaker.prefix else message
    if logger.hasHandlers():
        logger.log(level, text)
        return
    kind = "warning: " if level >= logging.WARNING else ""
    print(f"[rankwise] {kind}{text}", file=sys.stderr, flush=True)  # noqa: T201 - no logging is set up
