# SPDX-License-Identifier: Apache-2.0
"""The steps of all ranks side by side: how long each part took, and which rank waited for which.

Ranks leave an exchange together, so that the one that reaches it last determines the step of all. How long a rank waits
for that one follows from when each has reached it; no rank measures it. Within an update that the ranks of a host
share, and within a checkpoint, they wait again, for the one that takes longest for that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rankwise.insight.trace_events import clock_ahead
from rankwise.meter import BACKWARD, CHECKPOINT, EXCHANGE, OPTIMIZER, PARTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from rankwise.insight.run_records import RunRecords
    from rankwise.insight.step_record import Record

    Floats = NDArray[np.float64]


LEAST_MEASURED = 0.1
"""If the exchange takes a smaller share of what backward takes longer than on the fastest rank, that one waits inside
backward: the script exchanges gradients itself, and rankwise other values only."""
HALF_A_STEP = 0.5
LEAST_STEPS = 3
"""From how many steps on the last one does not count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTable:
    """The steps that all ranks have completed. Times are in seconds.

    Its many fields are the columns of one table.
    """

    ranks: tuple[int, ...]
    is_estimated: bool
    """Whether the exchange is what backward takes longer than on the rank that was fastest with it."""
    is_shifted: bool
    """Whether ranks have taken different numbers of steps, so that those of one number are not one step of training."""
    start: Floats
    """[rank, step], by the clock of rank zero's host."""
    parts: Floats
    """[rank, step, part], as in ``PARTS``. ``exchange`` includes waiting for the slowest rank."""
    waiting_for_gradients: Floats
    """[rank, step]: waiting for the rank that was last to compute its gradients."""
    last: NDArray[np.int64]
    """[step]: the index of that rank."""
    waiting_late: Floats
    """[rank, step]: waiting for the rank that took longest to update parameters or to write a checkpoint."""
    last_late: NDArray[np.int64]
    """[step]: the index of that rank."""
    processor: Floats
    """[rank, step]: processor time."""
    queued: Floats
    """[rank, step]: ready to run while other processes had the processor."""
    samples: Floats
    sent_bytes: Floats
    memory_bytes: Floats
    major_faults: Floats

    @property
    def num_ranks(self) -> int:
        """How many ranks."""
        return len(self.ranks)

    @property
    def num_steps(self) -> int:
        """How many steps."""
        return self.start.shape[1]

    @property
    def seconds(self) -> Floats:
        """[rank, step]: the whole step."""
        return self.parts.sum(axis=2)

    @property
    def waiting(self) -> Floats:
        """[rank, step]: waiting for a slower rank."""
        return self.waiting_for_gradients + self.waiting_late

    @property
    def transfer(self) -> Floats:
        """[rank, step]: the exchange without waiting for a slower rank."""
        return self.parts[:, :, EXCHANGE] - self.waiting

    def waiting_between(self) -> Floats:
        """Return [rank, rank]: how long the first waits for the second, in seconds per step."""
        found = np.zeros((self.num_ranks, self.num_ranks))
        for waiting, last in ((self.waiting_for_gradients, self.last), (self.waiting_late, self.last_late)):
            for rank in range(self.num_ranks):
                found[:, rank] += waiting[:, last == rank].sum(axis=1)
        return found / self.num_steps

    def mean_parts(self) -> dict[str, Floats]:
        """Return the mean time of each part of a step, [rank]; waiting for a slower rank apart from the exchange."""
        means = {name: self.parts[:, :, number].mean(axis=1) for number, name in enumerate(PARTS)}
        return {**means, "exchange": self.transfer.mean(axis=1), "waiting": self.waiting.mean(axis=1)}

    def steady(self) -> StepTable:
        """Return the table without the first step and the last one, if others remain.

        The first includes the start of the script; the last may include its end, or lack what follows an update.
        """
        return self._of(slice(1, None if self.num_steps < LEAST_STEPS else -1)) if self.num_steps > 1 else self

    def _of(self, steps: slice) -> StepTable:
        return StepTable(
            ranks=self.ranks,
            is_estimated=self.is_estimated,
            is_shifted=self.is_shifted,
            last=self.last[steps],
            last_late=self.last_late[steps],
            start=self.start[:, steps],
            parts=self.parts[:, steps],
            waiting_for_gradients=self.waiting_for_gradients[:, steps],
            waiting_late=self.waiting_late[:, steps],
            processor=self.processor[:, steps],
            queued=self.queued[:, steps],
            samples=self.samples[:, steps],
            sent_bytes=self.sent_bytes[:, steps],
            memory_bytes=self.memory_bytes[:, steps],
            major_faults=self.major_faults[:, steps],
        )


def table_of(records: Sequence[Record]) -> StepTable:
    """Return the steps that all ranks have completed, of records in rank order."""
    common = set.intersection(*({step.number for step in record.steps} for record in records))
    # A rank whose disk was full has lost steps in between.
    kept = [[step for step in record.steps if step.number in common] for record in records]
    num_steps = len(common)

    def column(name: str) -> Floats:
        return np.array([[getattr(step, name) for step in steps] for steps in kept], dtype=np.float64)

    ahead = np.array([clock_ahead(record) for record in records])[:, None]
    start = column("start") - ahead
    parts = column("parts").reshape(len(records), num_steps, len(PARTS))
    arrived = start + column("arrival")
    # The rank that comes last waits the least within backward.
    shortest = parts[:, :, BACKWARD].min(axis=0)
    longer = parts[:, :, BACKWARD] - shortest
    measured = parts[:, 1:, EXCHANGE].sum()
    is_estimated = len(records) > 1 and bool(
        measured < LEAST_MEASURED * longer[:, 1:].sum() or not parts[:, :, EXCHANGE].any()
    )
    if is_estimated:
        parts[:, :, EXCHANGE] += longer
        parts[:, :, BACKWARD] = shortest
        arrived = -parts[:, :, EXCHANGE]
    late = column("late_exchange")
    waiting = np.clip(arrived.max(axis=0) - arrived, 0.0, parts[:, :, EXCHANGE] - late)
    after = parts[:, :, OPTIMIZER] + parts[:, :, CHECKPOINT]
    return StepTable(
        ranks=tuple(record.facts["rank"] for record in records),
        is_estimated=is_estimated,
        is_shifted=_is_shifted(records, start, parts.sum(axis=2)),
        start=start,
        parts=parts,
        waiting_for_gradients=waiting,
        last=arrived.argmax(axis=0),
        waiting_late=np.clip(after.max(axis=0) - after, 0.0, late),
        last_late=after.argmax(axis=0),
        processor=column("processor"),
        queued=column("queued"),
        samples=column("samples"),
        sent_bytes=column("sent_bytes"),
        memory_bytes=column("memory_bytes"),
        major_faults=column("major_faults"),
    )


def _is_shifted(records: Sequence[Record], start: Floats, seconds: Floats) -> bool:
    """Return whether the last steps of one number have not been at one time, on ranks that have made unlike numbers."""
    if len({record.now.num_steps for record in records}) == 1:
        return False
    last = slice(-max(start.shape[1] // 4, 1), None)
    apart = np.ptp(start[:, last], axis=0) / seconds[:, last].mean(axis=0)
    return bool(np.median(apart) > HALF_A_STEP)


# -- runs side by side ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpeed:
    """How fast one run was."""

    name: str
    num_ranks: int
    step_seconds: float
    samples_per_second: float
    """Of all ranks together; 0 if unknown."""
    parts: dict[str, float]
    """The mean time of each part of a step, over ranks, in seconds; waiting apart from the rest of the exchange."""


def speed_of(run: RunRecords) -> RunSpeed:
    """Return how fast a run was, without its first step."""
    steady = table_of(run.ranks).steady()
    step_seconds = float(steady.seconds.mean())
    parts = {name: float(means.mean()) for name, means in steady.mean_parts().items()}
    return RunSpeed(
        name=run.folder.name or str(run.folder),
        num_ranks=steady.num_ranks,
        step_seconds=step_seconds,
        samples_per_second=float(steady.samples.sum(axis=0).mean()) / step_seconds,
        parts=parts,
    )


def speeds_of(runs: Sequence[RunRecords]) -> list[RunSpeed]:
    """Return how fast runs were, by different names where their folders lie in different ones."""
    speeds = [speed_of(run) for run in runs]
    if len({speed.name for speed in speeds}) == len(speeds):
        return speeds
    return [replace(speed, name=str(run.folder)) for speed, run in zip(speeds, runs, strict=True)]


def times_faster(speeds: Sequence[RunSpeed]) -> list[float]:
    """Return how many times as fast each run was as the first one of those with the fewest ranks."""
    first = min(speeds, key=lambda speed: speed.num_ranks)
    # Of runs of which some count no samples, steps are compared.
    by_samples = all(speed.samples_per_second for speed in speeds)
    if by_samples:
        return [speed.samples_per_second / first.samples_per_second for speed in speeds]
    return [first.step_seconds / speed.step_seconds for speed in speeds]
