# SPDX-License-Identifier: Apache-2.0
"""Noticing random numbers along the batch that a training loop draws outside of ``as_one_rank()``."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from rankwise.log import warn
from rankwise.places import user_place, words
from rankwise.session import current_or_none

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.batch_in_hand import BatchInHand

_noticed: set[str] = set()


class _OneByOne:
    """How often each line has drawn a single row, since the loop took its batch."""

    def __init__(self) -> None:
        self._batch: BatchInHand | None = None
        self._counts: Counter[str] = Counter()

    def count(self, batch: BatchInHand, place: str) -> None:
        """Count a draw; warn of the batch before, if a line has drawn once for each of its samples."""
        before = self._batch
        if batch is not before:
            if before is not None and 1 < before.num < before.num_global:
                for line, times in self._counts.items():
                    if times == before.num:
                        _warn_of_single_rows(line, times)
            self._batch = batch
            self._counts.clear()
        self._counts[place] += 1

    def forget(self) -> None:
        """Count from here."""
        self._batch = None
        self._counts.clear()


_one_by_one = _OneByOne()


def notice(operation: str, shape: Sequence[int]) -> None:
    """Warn once per line where numbers have as many rows as this rank has samples: one rank would draw other ones.

    Args:
        operation: that draws.
        shape: of what it draws.
    """
    session = current_or_none()
    if session is None or session.batch is None:
        return
    if math.prod(shape) == 1:
        _one_by_one.count(session.batch, words(user_place()))
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


def notice_in_block(numbers_of_one: int, num_samples: int) -> None:
    """Warn once per line where a block has drawn as many single numbers as there are samples.

    Args:
        numbers_of_one: how often the block has drawn one number.
        num_samples: of this rank.
    """
    if numbers_of_one == num_samples > 1:
        _warn_of_single_rows(words(user_place()), num_samples)


def _warn_of_single_rows(place: str, times: int) -> None:
    if place not in _noticed:
        _noticed.add(place)
        warn(
            f"{place} has drawn {times} random numbers one by one, as many as this rank has samples: they are not "
            "those that one rank would draw for these samples; draw them in one call, with as many rows as samples, "
            "inside `with rankwise.as_one_rank():`"
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
    _one_by_one.forget()
