# SPDX-License-Identifier: Apache-2.0
"""From typing the command to the first all_reduce done on every rank, and to its end; against torchrun."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import Row, interleaved, median_ratio, seconds, show

TORCHRUN_SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(4)
dist.all_reduce(x)
open(f"{sys.argv[1]}/{dist.get_rank()}", "w").write(repr(time.time()))
dist.destroy_process_group()
"""
RANKWISE_SCRIPT = """
import sys, time
import torch
import rankwise as rw
with rw.join() as world:
    rw.all_reduce(torch.ones(4))
    open(f"{sys.argv[1]}/{world.rank}", "w").write(repr(time.time()))
"""
REACH = {8: 0.22, 2: 0.6}
WHOLE_REACH = {8: 0.27}
REPETITIONS = {8: 5, 2: 9}


def timed(command: list[str], script: str, num_ranks: int, wholes: list[float]) -> float:
    """Return the seconds from start to the last rank's first all_reduce; append those to the command's end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(script)
        marks = Path(folder) / "marks"
        marks.mkdir()
        started = time.time()
        subprocess.run([*command, str(path), str(marks)], check=True, stderr=subprocess.DEVNULL)
        wholes.append(time.time() - started)
        times = [float(mark.read_text()) for mark in marks.iterdir()]
    if len(times) != num_ranks:
        message = f"{len(times)} of {num_ranks} ranks came to the end"
        raise RuntimeError(message)
    return max(times) - started


def measure(num_ranks: int) -> list[Row]:
    """Return the rows for ``num_ranks`` ranks."""
    ours = [sys.executable, "-m", "rankwise", "run", "-n", str(num_ranks)]
    theirs = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    wholes: dict[str, list[float]] = {"rankwise": [], "torchrun": []}
    sides = {
        "rankwise": lambda: timed(ours, RANKWISE_SCRIPT, num_ranks, wholes["rankwise"]),
        "torchrun": lambda: timed(theirs, TORCHRUN_SCRIPT, num_ranks, wholes["torchrun"]),
    }
    for side in sides.values():
        side()
    for one in wholes.values():
        one.clear()
    firsts = interleaved(sides, REPETITIONS[num_ranks])
    return [
        Row(
            f"{what}, {num_ranks} ranks, against torchrun",
            seconds(statistics.median(figures["rankwise"])),
            seconds(statistics.median(figures["torchrun"])),
            median_ratio(figures["rankwise"], figures["torchrun"]),
            reach.get(num_ranks, math.inf),
        )
        for what, figures, reach in (
            ("start to first all_reduce", firsts, REACH),
            ("start to end of a script of one all_reduce", wholes, WHOLE_REACH),
        )
    ]


if __name__ == "__main__":
    show([*measure(8), *measure(2)])
