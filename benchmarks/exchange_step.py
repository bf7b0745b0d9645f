# SPDX-License-Identifier: Apache-2.0
"""One training step on the ranks of one host: rankwise, a hand-written DistributedDataParallel, and no exchange.

rankwise with one copy of the parameters per host, and with a copy on each rank. All sides run in the same processes, a
few steps at a time in turn, one thread per rank, on batches that lie in memory: the step itself is measured, without
its loader.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from measure import Row, interleaved, median_ratio, seconds, show
from models import ALL_MODELS
from torch.nn.parallel import DistributedDataParallel

import rankwise as rw
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from rankwise.world.facts import World

NUM_BATCHES = 8
ROUNDS = 40
WARM_UP_ROUNDS = 4
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=1e-3),
    "SGD with momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-4),
}
PEERS = {"ddp": "DDP", "none": "no exchange"}
REACH = {
    ("AdamW", "one copy", "none"): {"60 small layers": 0.82, "wide MLP": 0.84, "transformer": 0.96},
    ("AdamW", "one copy", "ddp"): {
        "60 small layers": 0.55,
        "wide MLP": 0.57,
        "transformer": 0.85,
        "MONAI 3D UNet": 1.0,
    },
    ("SGD", "one copy", "none"): {"60 small layers": 1.12, "wide MLP": 1.12, "transformer": 1.06},
    ("SGD with momentum", "one copy", "none"): {"60 small layers": 1.05, "wide MLP": 1.05, "transformer": 1.05},
    ("SGD with momentum", "own copies", "ddp"): {"60 small layers": 0.62, "wide MLP": 0.68},
    ("AdamW", "own copies", "ddp"): {"60 small layers": 0.70, "wide MLP": 0.71},
}
"""The ratios to stay at or below, by optimizer, way and peer; of two ranks."""


def compare(world: World, name: str, kind: str, num_steps: int) -> dict[str, list[float]]:
    """Return seconds per step of every side, round by round."""
    build = ALL_MODELS[name]

    def side(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], float]:
        torch.manual_seed(0)
        plain, shape = build()
        model = wrap(plain)
        optimizer = OPTIMIZERS[kind](model.parameters())
        torch.manual_seed(world.rank)
        batches = [torch.randn(shape) for _ in range(NUM_BATCHES)]

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
        "one copy": side(partial(rw.replicate, one_copy_per_host=True)),
        "own copies": side(partial(rw.replicate, one_copy_per_host=False)),
        "ddp": side(DistributedDataParallel),
        "none": side(lambda model: model),
    }
    interleaved(sides, WARM_UP_ROUNDS)
    return interleaved(sides, ROUNDS)


def measure(name: str, kind: str, num_ranks: int) -> list[Row]:
    """Return the rows of one model and one optimizer."""
    num_steps = 10 if name == "60 small layers" else 3
    figures = run_ranks(compare, num_ranks, name, kind, num_steps, timeout_seconds=900)[0].get()
    return [
        Row(
            f"{kind} step, {name}, {num_ranks} ranks, {ours}, against {words}",
            seconds(statistics.median(figures[ours])),
            seconds(statistics.median(figures[peer])),
            median_ratio(figures[ours], figures[peer]),
            REACH.get((kind, ours, peer), {}).get(name, math.inf) if num_ranks == 2 else math.inf,
        )
        for ours in ("one copy", "own copies")
        for peer, words in PEERS.items()
    ]


if __name__ == "__main__":
    chosen = [name for name in ALL_MODELS if any(word in name for word in sys.argv[1:])] or list(ALL_MODELS)
    show(
        [
            row
            for name in chosen
            for kind in OPTIMIZERS
            for num_ranks in (2, 4)
            for row in measure(name, kind, num_ranks)
        ]
    )
