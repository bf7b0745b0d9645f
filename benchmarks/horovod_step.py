# SPDX-License-Identifier: Apache-2.0
"""One training step of a Horovod script on 2 ranks: hvd.DistributedOptimizer against a hand-written DDP.

Both run in the same processes, and rankwise.replicate with them, a few steps at a time in turn, one thread per rank,
on batches that lie in memory.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from measure import Row, interleaved, median_ratio, seconds, show
from torch.nn.parallel import DistributedDataParallel
from train_step import CASES

import rankwise as rw
import rankwise.compat.horovod as hvd
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from rankwise.world import World

NUM_RANKS = 2
NUM_BATCHES = 8
ROUNDS = 40
WARM_UP_ROUNDS = 4
REACH = 1.0


def compare(world: World, name: str) -> dict[str, list[float]]:
    """Return seconds per step of every side, round by round."""
    hvd.init()
    build, shape, local_batch_size, num_steps = CASES[name]
    torch.manual_seed(world.rank)
    batches = [torch.randn(local_batch_size, *shape) for _ in range(NUM_BATCHES)]

    def side(wrap: Callable[[nn.Module], nn.Module], *, by_optimizer: bool = False) -> Callable[[], float]:
        torch.manual_seed(0)
        model = wrap(build())
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if by_optimizer:
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

        def steps() -> float:
            dist.barrier()
            started = time.perf_counter()
            for number in range(num_steps):
                model(batches[number % NUM_BATCHES]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return (time.perf_counter() - started) / num_steps

        return steps

    sides = {
        "horovod": side(lambda model: model, by_optimizer=True),
        "ddp": side(DistributedDataParallel),
        "replicate": side(rw.replicate),
    }
    interleaved(sides, WARM_UP_ROUNDS)
    return interleaved(sides, ROUNDS)


def measure(name: str) -> list[Row]:
    """Return the rows of one model: each side of ours against DDP."""
    figures = run_ranks(compare, NUM_RANKS, name, timeout_seconds=600)[0].get()
    return [
        Row(
            f"step of {words}, {name}, {NUM_RANKS} ranks, against DDP",
            seconds(statistics.median(figures[own])),
            seconds(statistics.median(figures["ddp"])),
            median_ratio(figures[own], figures["ddp"]),
            REACH,
        )
        for own, words in (("horovod", "hvd.DistributedOptimizer"), ("replicate", "rw.replicate"))
    ]


if __name__ == "__main__":
    chosen = [name for name in CASES if any(word in name for word in sys.argv[1:])] or list(CASES)
    show([row for name in chosen for row in measure(name)])
