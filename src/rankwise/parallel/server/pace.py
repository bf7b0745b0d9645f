# SPDX-License-Identifier: Apache-2.0
"""How far the workers are, and which of them may take another step. Values only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Pace:
    """The steps of all workers.

    Args:
        workers: their ranks.
        max_staleness: by how many steps a worker may be ahead of the slowest when it begins one; ``None`` for any.
    """

    def __init__(self, workers: Iterable[int], max_staleness: int | None) -> None:
        self._max_staleness = max_staleness
        self._steps = dict.fromkeys(workers, 0)
        self._loops = dict.fromkeys(self._steps, 0)
        self._resting: set[int] = set()
        self.failed: set[int] = set()
        """Workers that are gone without having said so."""
        self.num_left = 0
        """How many have said so."""

    @property
    def living(self) -> set[int]:
        """The workers that are still there."""
        return set(self._steps)

    def step(self, worker: int) -> None:
        """Note that a worker has taken a step."""
        if worker in self._steps:
            self._steps[worker] += 1
            self._resting.discard(worker)

    def end_loop(self, worker: int) -> None:
        """Note that a worker has come to the end of a loop. Nobody waits for it until it steps again."""
        if worker in self._steps:
            self._loops[worker] += 1
            self._resting.add(worker)

    def go(self, worker: int, *, has_failed: bool) -> None:
        """Note that a worker is not there any more."""
        if self._steps.pop(worker, None) is None:
            return
        if has_failed:
            self.failed.add(worker)
        else:
            self.num_left += 1

    def may_go_on(self, worker: int) -> bool:
        """Return whether a worker may begin another step."""
        if self._max_staleness is None or worker not in self._steps:
            return True
        others = [steps for other, steps in self._steps.items() if other not in self._resting]
        return self._steps[worker] - min(others, default=self._steps[worker]) <= self._max_staleness

    def slowest(self) -> list[int]:
        """Return the workers that the others wait for."""
        others = {worker: steps for worker, steps in self._steps.items() if worker not in self._resting}
        return sorted(worker for worker, steps in others.items() if steps == min(others.values()))

    def have_ended_loop(self, number: int) -> bool:
        """Return whether every worker that is still there has come to the end of so many loops."""
        return all(self._loops[worker] >= number for worker in self._steps)
