# SPDX-License-Identifier: Apache-2.0
"""Whether splitting calls of one kind saves time: loops are timed with split and with whole calls, by turns.

What is timed is the time from one call to the next: forward, backward, and all that the script does in between. The
turns change places half way: of two, three, four or six calls in a step, each one is timed as often in both ways.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

NUM_TIMED = 12
"""Calls of each way before the ways are compared."""
AGAIN = 64
"""After how many times as many calls they are timed again: the first steps of a job are not like the others."""
MARGIN = 0.97
"""Split calls have to take less than this share of the time of whole ones."""


@dataclass(slots=True)
class Pace:
    """The times of calls of one kind."""

    is_split: bool = True
    """Whether the next calls should be split."""
    ratio: float | None = None
    """The time with split calls by the time with whole ones, once both were measured."""
    _times: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    _started: float | None = None
    _was_split: bool = True
    _num_until_timed: int = 0

    def next_is_split(self) -> bool:
        """Return whether the call that begins now is to be split."""
        now = time.perf_counter()
        if self._num_until_timed:
            self._num_until_timed -= 1
            self._started = None
            return self.is_split
        if self._started is not None:
            self._times[self._was_split].append(now - self._started)
        num = sum(map(len, self._times.values()))
        if num == 2 * NUM_TIMED:
            self._decide()
            return self.is_split
        self._started, self._was_split = now, (num % 2 == 0) == (num < NUM_TIMED)
        return self._was_split

    def take_rest(self) -> int:
        """Return how many calls are not to be timed, which the caller counts."""
        num, self._num_until_timed = self._num_until_timed, 0
        return num

    def interrupted(self) -> None:
        """Leave out the time since the last call."""
        self._started = None

    def _decide(self) -> None:
        # Without the longest loop of each way: it may have read files, or saved some.
        split, whole = (sum(times) - max(times) for times in (self._times[True], self._times[False]))
        self.ratio = split / whole
        self.is_split = self.ratio < MARGIN
        num = sum(map(len, self._times.values()))
        self._times = {True: [], False: []}
        self._num_until_timed = num * AGAIN
        self._started = None
