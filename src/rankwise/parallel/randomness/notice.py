# SPDX-License-Identifier: Apache-2.0
"""Noticing random numbers along the batch that a training loop draws outside of ``as_one_rank()``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.log import warn
from rankwise.places import user_place, words
from rankwise.session import current_or_none

if TYPE_CHECKING:
    from collections.abc import Sequence

_noticed: set[str] = set()


def notice(operation: str, shape: Sequence[int]) -> None:
    """Warn once per line where numbers have as many rows as this rank has samples: one rank would draw other ones.

    Args:
        operation: that draws.
        shape: of what it draws.
    """
    session = current_or_none()
    if session is None or session.batch is None or not shape:
        return
    rows = next((one for one in session.batches.values() if one.num == shape[0] and 1 < one.num < one.num_global), None)
    if rows is None or (place := words(user_place())) in _noticed:
        return
    _noticed.add(place)
    warn(
        f"{operation.partition('.')[0].strip('_')} at {place} draws {rows.num} rows, as many as this rank has samples: "
        "each rank draws its own (the same ones where the seeds are the same), and not its part of what one rank would "
        "draw; put that line into `with rankwise.as_one_rank():`"
    )


def warn_of_rejection(operation: str) -> None:
    """Warn once per line where ``randomness="torch"`` cannot have torch's numbers."""
    place = words(user_place())
    if place not in _noticed:
        _noticed.add(place)
        warn(
            f"{operation.strip('_')} at {place} takes as many random numbers as its values need, which no rank knows "
            "of the others' samples: its numbers are those of the position, not torch's"
        )


def forget_notices() -> None:
    """Warn again."""
    _noticed.clear()
