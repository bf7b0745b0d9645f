# SPDX-License-Identifier: Apache-2.0
"""In which steps ranks compare: often at first, then every so many. The same on every rank. Used by guard."""

from __future__ import annotations


class Schedule:
    """The steps of one comparison: a number of first ones, then twice as far each time, up to so many apart.

    Args:
        num_first: steps at the beginning, each of which is due.
        every: how many steps apart the others are at most.
    """

    def __init__(self, num_first: int, every: int) -> None:
        self.next = 0
        """The next step that is due, from 0."""
        self._num_first = num_first
        self._every = every
        self._least = 1

    def advance(self, step: int) -> None:
        """Take in that ranks have compared in ``step``."""
        apart = 1 if step < self._num_first else min(step, self._every)
        self.next = step + max(apart, self._least)

    def be_patient(self, most: int) -> None:
        """Compare half as often from now on, down to every ``most`` steps: what was found meant nothing."""
        self._least = min(max(2 * self._least, 16), most)
