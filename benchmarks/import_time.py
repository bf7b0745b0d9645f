# SPDX-License-Identifier: Apache-2.0
"""`import rankwise`, with all its public names, against `import torch`, each in a process of its own."""

from __future__ import annotations

import statistics
import subprocess
import sys

from measure import Row, interleaved, median_ratio, seconds, show

REPETITIONS = 11
REACH = 1.2


def timed(statement: str) -> float:
    """Return the seconds a fresh process spends on an import."""
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    return float(subprocess.check_output([sys.executable, "-c", code]))


if __name__ == "__main__":
    sides = {"rankwise": lambda: timed("from rankwise import *"), "torch": lambda: timed("import torch")}
    interleaved(sides, 1)
    figures = interleaved(sides, REPETITIONS)
    show(
        [
            Row(
                "import rankwise, against import torch",
                seconds(statistics.median(figures["rankwise"])),
                seconds(statistics.median(figures["torch"])),
                median_ratio(figures["rankwise"], figures["torch"]),
                REACH,
            )
        ]
    )
