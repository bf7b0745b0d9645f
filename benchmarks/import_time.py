# SPDX-License-Identifier: Apache-2.0
"""`import rankwise`, with its public names, against `import torch`, each in a process of its own.

Without `shard` and `tensor_parallel`: they import torch's FSDP2 and DTensor when they are first used.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from measure import Row, interleaved, median_ratio, seconds, show

import rankwise

REPETITIONS = 11
REACH = 1.2


def timed(statement: str) -> float:
    """Return the seconds a fresh process spends on an import."""
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    return float(subprocess.check_output([sys.executable, "-c", code]))


if __name__ == "__main__":
    names = ", ".join(name for name in rankwise.__all__ if name not in {"plan_of", "shard", "tensor_parallel"})
    sides = {"rankwise": lambda: timed(f"from rankwise import {names}"), "torch": lambda: timed("import torch")}
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
