# SPDX-License-Identifier: Apache-2.0
"""How ``rankwise top`` is answered: the pace of the ranks of this machine, from the records that they keep.

The ranks are not asked, and notice nothing. Imported by the agent.
"""

from __future__ import annotations

import contextlib
import time
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rankwise.errors import ReportError
from rankwise.health.step_record import EXCHANGE, PARTS, read, read_latest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rankwise.health.step_record import Record


def paces(paths: Mapping[int, Path]) -> dict[str, Any]:
    """Return what the last steps of each rank took and what it does now, as JSON; only of ranks with a record."""
    found: dict[int, Record] = {}
    for rank, path in paths.items():
        with contextlib.suppress(OSError, ReportError):
            found[rank] = read_latest(path)
    return {
        "ranks": {str(rank): _pace(record) for rank, record in sorted(found.items())},
        "values": _values(paths[0]) if 0 in found else {},
    }


def _pace(record: Record) -> dict[str, Any]:
    steps, now = record.steps[-32:], record.now
    seconds = fmean(step.seconds for step in steps) if steps else 0.0
    return {
        "steps": now.num_steps,
        "world_size": record.facts["world_size"],
        "step_seconds": seconds,
        "parts": {name: fmean(step.parts[part] for step in steps) if steps else 0.0 for part, name in enumerate(PARTS)},
        "own_seconds": seconds - fmean(step.parts[EXCHANGE] for step in steps) if steps else 0.0,
        "memory_bytes": steps[-1].memory_bytes if steps else 0,
        "samples": fmean(step.samples for step in steps) if steps else 0.0,
        "now": PARTS[now.part],
        "seconds_in_step": max(0.0, time.monotonic() - now.step_began),
    }


def _values(path: Path) -> dict[str, float | None]:
    """Return the last value that was logged under each name."""
    with contextlib.suppress(OSError, ReportError):
        notes = read(path).notes
        return {note["name"]: note["values"][-1] for note in notes if note["kind"] == "values"}
    return {}


def line_of(answer: dict[str, Any]) -> str:
    """Return what :func:`paces` has returned as one line: pace, logged values, slowest rank; empty at first."""
    ranks = answer["ranks"]
    seconds = max((pace["step_seconds"] for pace in ranks.values()), default=0.0)
    if not seconds:
        return ""
    words = [f"step {min(pace['steps'] for pace in ranks.values())}", f"{1 / seconds:.1f} steps/s"]
    words += [f"{name} {value:.4g}" for name, value in answer["values"].items() if value is not None]
    if len(ranks) > 1:
        words.append(f"slowest: rank {max(ranks, key=lambda rank: ranks[rank]['own_seconds'])}")
    return ", ".join(words)
