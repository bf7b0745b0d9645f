# SPDX-License-Identifier: Apache-2.0
"""Warnings of losses, each once per line of the user's."""

from __future__ import annotations

from rankwise.log import warn
from rankwise.places import user_place, words

_warned: set[tuple[str, str]] = set()


def warn_once(about: str, message: str, *, all_ranks: bool = False) -> None:
    """Warn, unless the same was warned of at this line before.

    Args:
        about: what the warning is about.
        message: with ``{where}`` in the place of the line.
        all_ranks: whether this rank says it even if it is not rank zero, as where only some ranks know of it.
    """
    where = words(user_place())
    if (where, about) not in _warned:
        _warned.add((where, about))
        warn(message.format(where=where), all_ranks=all_ranks)


def forget_warnings() -> None:
    """Have every warning said again. Called by: what leaves the world."""
    _warned.clear()
