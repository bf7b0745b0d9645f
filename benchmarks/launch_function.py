# SPDX-License-Identifier: Apache-2.0
"""From calling to every rank's value, of a function that does one all_reduce: launch against torch.multiprocessing."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import Row, interleaved, median_ratio, seconds, show

RANKWISE_SCRIPT = """
import time
import torch
import rankwise as rw

def total():
    with rw.join():
        return rw.all_reduce(torch.ones(4)).sum().item()

started = time.perf_counter()
values = rw.launch(total, ranks=NUM_RANKS, device="cpu")
print(time.perf_counter() - started)
assert values == [4.0 * NUM_RANKS] * NUM_RANKS
"""
SPAWN_SCRIPT = """
import tempfile, time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def total(rank, folder, values):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    x = torch.ones(4)
    dist.all_reduce(x)
    values.put((rank, x.sum().item()))
    dist.destroy_process_group()

if __name__ == "__main__":
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        values = mp.get_context("spawn").SimpleQueue()
        ranks = mp.spawn(total, (folder, values), NUM_RANKS, join=False)
        found = dict(values.get() for _ in range(NUM_RANKS))
        while not ranks.join():
            pass
    print(time.perf_counter() - started)
    assert found == {rank: 4.0 * NUM_RANKS for rank in range(NUM_RANKS)}
"""
REACH = {8: 0.6, 2: 0.9}
REPETITIONS = {8: 3, 2: 7}


def timed(script: str, num_ranks: int) -> float:
    """Return the seconds that a script says its call took."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(script.replace("NUM_RANKS", str(num_ranks)))
        shown = subprocess.run(
            [sys.executable, str(path)], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ).stdout
    return float(shown)


def measure(num_ranks: int) -> Row:
    """Return the row for ``num_ranks`` ranks."""
    sides = {
        "rankwise": lambda: timed(RANKWISE_SCRIPT, num_ranks),
        "spawn": lambda: timed(SPAWN_SCRIPT, num_ranks),
    }
    for side in sides.values():
        side()
    figures = interleaved(sides, REPETITIONS[num_ranks])
    return Row(
        f"call to every rank's value, {num_ranks} ranks, against torch.multiprocessing.spawn",
        seconds(statistics.median(figures["rankwise"])),
        seconds(statistics.median(figures["spawn"])),
        median_ratio(figures["rankwise"], figures["spawn"]),
        REACH[num_ranks],
    )


if __name__ == "__main__":
    show([measure(8), measure(2)])
