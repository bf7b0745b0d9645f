# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: interleaved runs, medians, ratios, and the machine they ran on."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Row:
    """One line of the table: a figure of ours against a peer's, from one run."""

    what: str
    ours: str
    peer: str
    ratio: float
    reach: float = math.inf
    """The ratio to stay at or below; none where the figure is what was asked for."""


def interleaved(sides: dict[str, Callable[[], float]], repetitions: int) -> dict[str, list[float]]:
    """Call each side in turn, the order turning too, and return its figures, pair by pair."""
    figures: dict[str, list[float]] = {name: [] for name in sides}
    for repetition in range(repetitions):
        names = list(sides) if repetition % 2 == 0 else list(sides)[::-1]
        for name in names:
            figures[name].append(sides[name]())
    return figures


def median_ratio(ours: list[float], peers: list[float]) -> float:
    """Return the median of the ratios, pair by pair: drift of the machine cancels."""
    return statistics.median(a / b for a, b in zip(ours, peers, strict=True))


def seconds(value: float) -> str:
    """Return a time in the unit that reads best."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def machine() -> str:
    """Return the hardware and the versions, in one line."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return (
        f"{len(os.sched_getaffinity(0))} cores of {model}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, {platform.system()} {platform.release()}"
    )


def show(rows: list[Row]) -> None:
    """Print the table, and as JSON for benchmarks/run.py when it asks for it."""
    if "--json" in sys.argv:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(table(rows))


def table(rows: list[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = ["| what | rankwise | peer | ratio | reach |", "|---|---|---|---|---|"]
    for row in rows:
        missed = "" if row.ratio <= row.reach else " (missed)"
        reach = "" if math.isinf(row.reach) else f"<= {row.reach:g}{missed}"
        lines.append(f"| {row.what} | {row.ours} | {row.peer} | {row.ratio:.3g} | {reach} |")
    return "\n".join(lines)
