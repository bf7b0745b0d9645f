# SPDX-License-Identifier: Apache-2.0
"""Names a rank that is slower than the others for many steps, once, with what it is slow at.

Each rank adds how long it has worked to sums in the store, once per window of steps, and compares itself with the mean
of the others a window later: no rank waits for another, and none reads what every other one has written.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from rankwise import meter
from rankwise.log import warn
from rankwise.meter import BACKWARD, DATA, EXCHANGE, FORWARD, OPTIMIZER, PARTS

if TYPE_CHECKING:
    from rankwise.insight.step_record import Step
    from rankwise.store.client import Store

FIRST_WINDOW, LARGEST_WINDOW = 50, 200
"""For how many steps a rank must be slower: at first, and later, as comparing takes time on every rank."""
SLOWER = 1.2
"""By which factor."""
LEAST_SECONDS = 0.001
"""Steps that are shorter than this, without waiting, differ by the noise of the machine."""
LEAST_PROCESSOR = 0.7
"""A rank that computes for longer but has a processor for a smaller share of that time was kept from computing."""
FAULTS_PER_STEP = 5.0
_COUNT_BITS = 16
_MICROSECONDS = 1e6
_KINDS = ("data", "computing", "script")

_ADVICE = {
    "data": "it waits for its data: raise num_workers of the loader, or move its files to a faster disk",
    "computing": "it computes for longer: does it have more samples than the others, or a slower processor?",
    "processor": "it gets too little processor time: other processes use its cores, or something stops it",
    "swapping": "it reads memory back from a disk (swapping): give it more memory, or make it use less",
    "script": "it spends that in the script, outside of the model and the loader: find what only this rank does there",
}


class SlowRank:
    """What one rank has added up of its steps.

    Args:
        store: keys of this comparison.
        world_size: the number of ranks that take the same steps.
    """

    def __init__(self, store: Store, world_size: int) -> None:
        self._store = store
        self._world_size = world_size
        self._steps: list[Step] = []
        self._window = 0
        """The number of the latest window."""
        self._before_steps: list[Step] = []
        self._is_store_lost = False
        self._has_warned = False

    def note(self, step: Step) -> None:
        """Take a step into account. Called by the meter, after each step."""
        if self._is_store_lost or step.number == 1:
            return
        self._steps.append(step)
        if len(self._steps) == min(FIRST_WINDOW * 2**self._window, LARGEST_WINDOW):
            try:
                self._compare()
                self._add()
            except (OSError, TimeoutError):
                # Whatever waits for a lost store reports it.
                self._is_store_lost = True
                self._steps.clear()

    def _add(self) -> None:
        self._window += 1
        for kind, seconds in zip(_KINDS, _spent(self._steps), strict=True):
            self._store.add(f"{self._window}/{kind}", (round(seconds * _MICROSECONDS) << _COUNT_BITS) + 1)
        self._before_steps, self._steps = self._steps, []

    def _compare(self) -> None:
        """Compare the window before with the mean of the other ranks, all of which have added theirs by now."""
        if not self._before_steps or self._has_warned:
            return
        own = _spent(self._before_steps)
        others = []
        for kind, seconds in zip(_KINDS, own, strict=True):
            total = self._store.add(f"{self._window}/{kind}", 0)
            if total & (2**_COUNT_BITS - 1) != self._world_size:
                return
            others.append(((total >> _COUNT_BITS) / _MICROSECONDS - seconds) / (self._world_size - 1))
        if sum(own) < SLOWER * sum(others) or sum(own) < LEAST_SECONDS:
            return
        self._has_warned = True
        excess = [mine - mean for mine, mean in zip(own, others, strict=True)]
        cause = _cause(_KINDS[excess.index(max(excess))], self._before_steps)
        more = sum(own) / sum(others) - 1 if sum(others) else 1.0
        told = (
            f"this rank works {more:.0%} longer than the others for {len(self._before_steps)} steps, and they wait for "
            f"it: {_ADVICE[cause]}"
        )
        warn(told, all_ranks=True)
        meter.current.note_event(told)


def _spent(steps: list[Step]) -> list[float]:
    """Return how long a step takes for data, computing, and the rest without the exchange: medians, against noise.

    Updates are left out: each rank of a host has its own parameters to update, and one may be as large as all others.
    """
    parts = [median(step.parts[part] for step in steps) for part in range(len(PARTS))]
    computing = parts[FORWARD] + parts[BACKWARD]
    return [parts[DATA], computing, sum(parts) - parts[DATA] - computing - parts[EXCHANGE] - parts[OPTIMIZER]]


def _cause(kind: str, steps: list[Step]) -> str:
    if sum(step.major_faults for step in steps) >= FAULTS_PER_STEP * len(steps):
        return "swapping"
    working = sum(step.seconds - step.parts[EXCHANGE] for step in steps)
    if kind == "computing" and sum(step.processor for step in steps) < LEAST_PROCESSOR * working:
        return "processor"
    return kind
