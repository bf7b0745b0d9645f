# SPDX-License-Identifier: Apache-2.0
"""The steps in which ranks compare: every rank computes the same ones, without asking."""

from __future__ import annotations


class CheckSchedule:
    """The steps of one comparison: the first ``num_first``, then twice as far each time, up to ``every`` apart."""

    def __init__(self, num_first: int, every: int) -> None:
        self.next = 0
        """The next step that is due, from 0."""
        self._num_first = num_first
        self._every = every
        self._least = 1

    def is_due(self, step: int) -> bool:
        """Return whether ranks compare in ``step``, and note that they have."""
        if step < self.next:
            return False
        self.advance(step)
        return True

    def advance(self, step: int) -> None:
        """Note that ranks have compared in ``step``."""
        apart = 1 if step < self._num_first else min(step, self._every)
        self.next = step + max(apart, self._least)

    def be_patient(self, most: int) -> None:
        """Compare half as often from now on, down to every ``most`` steps: the difference was harmless."""
        self._least = min(max(2 * self._least, 16), most)
