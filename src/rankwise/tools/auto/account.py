# SPDX-License-Identifier: Apache-2.0
"""Which calls were split, and why others were not: for the log, and for the report of the run."""

from __future__ import annotations

from collections import Counter

from rankwise.health.step_meter import note_layout
from rankwise.log import log

SLOWER = "it would be slower split"


class Account:
    """Counts the calls of modules, by class."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        """By class, and by the reason why calls were not split; no words: they were."""
        self._said: set[str] = set()

    def add(self, name: str, reason: str = "", count: int = 1) -> None:
        """Count calls."""
        self._counts[name, reason] += count

    def say(self, message: str, figures: str = "") -> None:
        """Log a message, if it was not logged yet, with the figures of this time."""
        if message not in self._said:
            self._said.add(message)
            log(message + figures)
            self.record()

    def record(self) -> None:
        """Have the report show what has been counted."""
        rows = [[name, count, reason] for (name, reason), count in self._counts.items()]
        if rows:
            note_layout("calls", rows=rows)
