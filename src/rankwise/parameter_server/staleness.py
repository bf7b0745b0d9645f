# SPDX-License-Identifier: Apache-2.0
"""How many steps and loops the workers have taken, and which may take another step. Values only."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class StalenessBound:
    """The steps of all workers.

    Args:
        workers: their ranks.
        max_staleness: how many steps a worker may be ahead of the slowest when it begins one; ``None`` for any.
    """

    def __init__(self, workers: Iterable[int], max_staleness: int | None) -> None:
        self._max_staleness = max_staleness
        self._steps = dict.fromkeys(workers, 0)
        self._loops: dict[int, Counter[int]] = {worker: Counter() for worker in self._steps}
        """How many loops each has finished: by loader, and under 0 those in which it took steps."""
        self._resting: set[int] = set()
        self.failed: set[int] = set()
        """Workers whose connection ended without a leave message."""
        self.left: set[int] = set()
        """Workers that sent a leave message."""

    @property
    def living(self) -> set[int]:
        """The workers that are still connected."""
        return set(self._steps)

    def step(self, worker: int) -> None:
        """Note that a worker has taken a step."""
        if worker in self._steps:
            self._steps[worker] += 1
            self._resting.discard(worker)

    def end_loop(self, worker: int, loader: int, *, has_stepped: bool, count: int = 1) -> None:
        """Note that a worker has finished ``count`` loops over a loader, 0 for one that is not rankwise's.

        If it took steps in them, no other worker waits for it until its next step.
        """
        if worker in self._steps:
            self._loops[worker][loader] += count
            if has_stepped:
                self._loops[worker][0] += loader != 0
                self._resting.add(worker)

    def remove(self, worker: int, *, has_failed: bool) -> None:
        """Note that a worker has left or failed."""
        if self._steps.pop(worker, None) is None:
            return
        self._resting.discard(worker)
        if has_failed:
            self.failed.add(worker)
        else:
            self.left.add(worker)

    def may_step(self, worker: int) -> bool:
        """Return whether a worker may begin another step."""
        if self._max_staleness is None or worker not in self._steps:
            return True
        others = [steps for other, steps in self._steps.items() if other not in self._resting]
        return self._steps[worker] - min(others, default=self._steps[worker]) <= self._max_staleness

    def slowest(self) -> list[int]:
        """Return the workers that the others wait for."""
        others = {worker: steps for worker, steps in self._steps.items() if worker not in self._resting}
        return sorted(worker for worker, steps in others.items() if steps == min(others.values()))

    def only_wait_for(self, silent: set[int]) -> set[int]:
        """Return the workers amid a loop, if all of them are silent and another worker has finished or left."""
        amid = self.living - self._resting
        is_anyone_done = bool(self._resting or self.left)
        return amid if is_anyone_done and amid <= silent else set()

    def num_loops(self, loader: int) -> int:
        """Return how many loops over a loader every connected worker has finished."""
        return min((self._loops[worker][loader] for worker in self._steps), default=0)
