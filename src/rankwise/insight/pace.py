# SPDX-License-Identifier: Apache-2.0
"""The pace of a rank that is still training, from its record: the rank is not asked, and notices nothing."""

from __future__ import annotations

import math
import time
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rankwise.insight.step_record import read_latest
from rankwise.meter import EXCHANGE, PARTS

if TYPE_CHECKING:
    from pathlib import Path

NUM_STEPS = 32
"""The pace is the mean of so many steps."""


def pace_of(path: Path) -> dict[str, Any]:
    """Return what the last steps of the rank of a record took, what it logged and does now, as JSON.

    Raises:
        OSError, ReportError: there is no such record.
    """
    record = read_latest(path)
    now = record.now
    # The first one includes the start of the script.
    steps = [step for step in record.steps[-NUM_STEPS:] if step.number > 1] or record.steps
    seconds = fmean(step.seconds for step in steps) if steps else 0.0
    return {
        "steps": now.num_steps,
        "host": record.facts["hostname"],
        "world_size": record.facts["world_size"],
        "step_seconds": seconds,
        "parts": {name: fmean(step.parts[part] for step in steps) if steps else 0.0 for part, name in enumerate(PARTS)},
        "own_seconds": seconds - fmean(step.parts[EXCHANGE] for step in steps) if steps else 0.0,
        "memory_bytes": steps[-1].memory_bytes if steps else 0,
        "samples": fmean(step.samples for step in steps) if steps else 0.0,
        "values": {name: _number(value.own) for name, value in record.values.items() if value.own is not None},
        "means": {name: _number(value.mean) for name, value in record.values.items()},
        "now": PARTS[now.part],
        "seconds_in_step": max(0.0, time.monotonic() - now.step_began),
    }


def _number(value: float) -> float | str:
    """Return a number as JSON, which has none for what is not finite: ``"nan"``, ``"inf"``, ``"-inf"``."""
    return value if math.isfinite(value) else str(value)
