# SPDX-License-Identifier: Apache-2.0
"""One training step of scripts written for Horovod and for MegEngine, against a hand-written DDP; 2 ranks.

All run in the same processes, and rankwise.replicate with them, a few steps at a time in turn, one thread per rank,
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
import rankwise.compat.megengine.distributed as mge_distributed
from rankwise.compat.megengine import autodiff
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from rankwise.world.facts import World

NUM_RANKS = 2
NUM_BATCHES = 8
ROUNDS = 40
WARM_UP_ROUNDS = 4
REACH = 1.0
OWN = (
    ("horovod", "hvd.DistributedOptimizer"),
    ("megengine", "GradManager with make_allreduce_cb"),
    ("replicate", "rw.replicate"),
)


def compare(world: World, name: str) -> dict[str, list[float]]:
    """Return seconds per step of every side, round by round."""
    hvd.init()
    build, shape, local_batch_size, num_steps = CASES[name]
    torch.manual_seed(world.rank)
    batches = [torch.randn(local_batch_size, *shape) for _ in range(NUM_BATCHES)]

    def side(wrap: Callable[[nn.Module], nn.Module], words: str = "") -> Callable[[], float]:
        torch.manual_seed(0)
        model = wrap(build())
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        manager = autodiff.GradManager()
        if words == "horovod":
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        elif words == "megengine":
            manager.attach(model.parameters(), callbacks=[mge_distributed.make_allreduce_cb("mean")])

        def backward(batch: torch.Tensor) -> None:
            if words == "megengine":
                with manager:
                    manager.backward(model(batch).square().mean())
            else:
                model(batch).square().mean().backward()

        def steps() -> float:
            dist.barrier()
            started = time.perf_counter()
            for number in range(num_steps):
                backward(batches[number % NUM_BATCHES])
                optimizer.step()
                optimizer.zero_grad()
            return (time.perf_counter() - started) / num_steps

        return steps

    sides = {
        "horovod": side(lambda model: model, "horovod"),
        "megengine": side(lambda model: model, "megengine"),
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
        for own, words in OWN
    ]


if __name__ == "__main__":
    chosen = [name for name in CASES if any(word in name for word in sys.argv[1:])] or list(CASES)
    show([row for name in chosen for row in measure(name)])
