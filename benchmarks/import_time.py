# SPDX-License-Identifier: Apache-2.0
"""`import rankwise` against `import torch`, each in a process of its own."""

from __future__ import annotations

import statistics
import subprocess
import sys

from measure import Row, interleaved, median_ratio, seconds, show

REPETITIONS = 11
REACH = 1.2


def timed(module: str) -> float:
    """Return the seconds a fresh process spends importing ``module``."""
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    return float(subprocess.check_output([sys.executable, "-c", code]))


if __name__ == "__main__":
    sides = {"rankwise": lambda: timed("rankwise"), "torch": lambda: timed("torch")}
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
