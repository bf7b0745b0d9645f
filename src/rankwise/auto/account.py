# SPDX-License-Identifier: Apache-2.0
"""Which calls were split, and why others were not: for the log, and for the report of the run."""

from __future__ import annotations

import time
from collections import Counter

from rankwise.log import log
from rankwise.meter import note_layout

SLOWER = "splitting it would be slower"
NO_ROWS = "its batch has too few samples for so many ranks, or no rows"
TOLD_AFTER_SECONDS = 30.0
"""It is said then if nothing has been split."""


class Account:
    """Counts the calls of modules, by class."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._tell_at: float | None = time.monotonic() + TOLD_AFTER_SECONDS
        self._counts: Counter[tuple[str, str]] = Counter()
        """By class, and by the reason why calls were not split; no words: they were."""
        self._said: set[str] = set()

    def add(self, name: str, reason: str = "") -> None:
        """Count a call."""
        self._counts[name, reason] += 1
        if not reason:
            self._tell_at = None
        elif self._tell_at is not None and time.monotonic() > self._tell_at:
            self._tell_at = None
            (most, why), _ = self._counts.most_common(1)[0]
            self.say(
                f"auto: no call of a model has been split so far, so {self._num_ranks} ranks are no faster than one: "
                f"{most} runs whole, because {why}. docs/auto.md says what can be split, and what to change"
            )

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
