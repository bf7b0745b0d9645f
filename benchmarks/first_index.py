# SPDX-License-Identifier: Apache-2.0
"""The first index of a shuffled epoch of 10^8 samples, and that of position 7*10^7: against DistributedSampler.

The peer has no position: to resume it draws the whole order again and skips. Each run is a process of its own;
its memory is the growth of the peak over what it held before.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from measure import Row, interleaved, median_ratio, seconds, show

NUM_SAMPLES = 10**8
POSITION = 7 * 10**7
REPETITIONS = 3
MOST_MEGABYTES = 10
REACH = 0.01

COMMON = f"""
import resource, time
import torch
class Samples:
    def __len__(self): return {NUM_SAMPLES}
    def __getitem__(self, i): return i
def peak_megabytes(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
def report(make):
    next(make())
    before = peak_megabytes()
    start = time.perf_counter()
    next(make())
    print(time.perf_counter() - start, peak_megabytes() - before)
"""
OURS = """
from rankwise import ShardedSampler
def make():
    sampler = ShardedSampler(SIZE, global_batch_size=128, rank=0, world_size=1)
    if POSITION:
        state = sampler.state_dict()
        sampler.load_state_dict({**state, "position": POSITION})
    return iter(sampler)
SIZE = 1000
saved, POSITION = POSITION, 0
next(make())
SIZE, POSITION = NUM_SAMPLES, saved
report(make)
"""
PEER = """
import itertools
from torch.utils.data.distributed import DistributedSampler
def make():
    sampler = DistributedSampler(Samples(), num_replicas=1, rank=0, shuffle=True)
    return itertools.islice(iter(sampler), POSITION, None)
before = peak_megabytes()
start = time.perf_counter()
next(make())
print(time.perf_counter() - start, peak_megabytes() - before)
"""


def run(code: str, position: int) -> tuple[float, float]:
    """Return seconds and megabytes of one process."""
    program = f"{COMMON}\nPOSITION, NUM_SAMPLES = {position}, {NUM_SAMPLES}\n{code}"
    first, second = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    return float(first), float(second)


def measure(position: int) -> list[Row]:
    """Return the rows for time and memory at one position."""
    megabytes: dict[str, list[float]] = {"rankwise": [], "torch": []}

    def side(name: str, code: str) -> float:
        taken, grown = run(code, position)
        megabytes[name].append(grown)
        return taken

    figures = interleaved(
        {"rankwise": lambda: side("rankwise", OURS), "torch": lambda: side("torch", PEER)}, REPETITIONS
    )
    where = "first index" if position == 0 else f"index at position {position:.0e}"
    grown = statistics.median(megabytes["rankwise"])
    return [
        Row(
            f"{where} of a shuffled epoch of 10^8, against DistributedSampler",
            seconds(statistics.median(figures["rankwise"])),
            seconds(statistics.median(figures["torch"])),
            median_ratio(figures["rankwise"], figures["torch"]),
            REACH,
        ),
        Row(
            f"{where}: extra memory, against {MOST_MEGABYTES} MB",
            f"{grown:.1f} MB",
            f"{statistics.median(megabytes['torch']):.0f} MB",
            grown / MOST_MEGABYTES,
            1.0,
        ),
    ]


if __name__ == "__main__":
    show([*measure(0), *measure(POSITION)])
