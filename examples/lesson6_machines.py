# SPDX-License-Identifier: Apache-2.0
"""Lesson 6 of the course: what a rank knows about itself and its machine.

rankwise run -n 2 examples/lesson6_machines.py --plot all-reduce.svg
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import torch
from curve import draw

import rankwise as rw

MEGABYTES = (1, 2, 4, 8)
NUM_TRIES = 5


def milliseconds_of_a_sum(megabytes: int, device: str | torch.device) -> float:
    """Return how long the ranks take to add up a tensor, the median of a few tries. Called by every rank."""
    tensor = torch.zeros(megabytes * 250_000, device=device)
    times = []
    for _ in range(NUM_TRIES):
        start = time.perf_counter()
        rw.all_reduce(tensor).sum().item()  # waits for a device, too
        times.append(1000 * (time.perf_counter() - start))
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="picture of the time of an all_reduce over its size, as .svg")
    options = parser.parse_args()

    with rw.join() as world:
        machine = f"machine {world.node_rank + 1} of {world.num_nodes}"
        place = f"rank {world.rank} of {world.world_size}: {machine}, local rank {world.local_rank}, on {world.device}"
        for line in rw.all_gather_object(place):
            rw.print(line)
        rw.print(f"the sum of all ranks' numbers is {rw.all_reduce(world.rank)}")
        if options.plot:
            times = [(size, milliseconds_of_a_sum(size, world.device)) for size in MEGABYTES]
            if world.rank == 0:
                title = "Time of an all_reduce"
                draw(options.plot, {"all_reduce": times}, x_label="megabytes", y_label="milliseconds", title=title)


if __name__ == "__main__":
    main()
