# SPDX-License-Identifier: Apache-2.0
"""Launches functions of this script on Ray, and prints what they return and raise, as JSON.

Argument: the address of the cluster.
"""

import json
import os
import sys
from pathlib import Path

import ray
import torch

import rankwise as rw


class Words:
    """Something that only this script knows."""

    def __init__(self, text: str) -> None:
        self.text = text


def count(words: Words) -> list:
    """Return what a rank knows."""
    with rw.join() as world:
        total = float(rw.all_reduce(torch.tensor(float(world.rank))))
        print(f"{words.text} of rank {world.rank}", flush=True)
        return [world.rank, total, os.environ["OMP_NUM_THREADS"], str(Path.cwd())]


def fail() -> None:
    """Fail on rank 1."""
    with rw.join() as world:
        if world.rank == 1:
            raise KeyError("the second")
        rw.barrier()


if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False)
    told = {"values": rw.launch(count, Words("greetings"), ranks=2, on="ray", cpus_per_rank=2)}
    try:
        rw.launch(fail, ranks=2, on="ray")
    except KeyError as error:
        told["error"] = [repr(error), *error.__notes__]
    print(json.dumps(told))
