# SPDX-License-Identifier: Apache-2.0
"""Runs side by side: how fast each was, and how much faster than the one with the fewest ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rankwise.insight.step_table import table_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.insight.run_records import RunRecords


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
