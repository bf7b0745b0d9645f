# SPDX-License-Identifier: Apache-2.0
"""One training step on the ranks of one host: rankwise, a hand-written DistributedDataParallel, and no exchange.

All three run in the same processes, a few steps at a time in turn, one thread per rank, on batches that lie in
memory: the step itself is measured, without its loader. The last side shows what is left to gain.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from measure import Row, interleaved, median_ratio, seconds, show
from models import MODELS
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
REACH = {
    "60 small layers": (0.60, 1.15),
    "wide MLP": (0.68, 1.20),
    "transformer": (0.90, 1.06),
    "MONAI 3D UNet": (1.0, math.inf),
}
"""The ratios to stay at or below: against DDP, and against no exchange."""


def unet() -> tuple[nn.Module, tuple[int, ...]]:
    """Return the net of examples/unet3d.py: 19 MB of gradients, a batch of two crops."""
    from monai.networks.nets import UNet  # noqa: PLC0415 - takes seconds to import, for this model only

    net = UNet(3, in_channels=1, out_channels=1, channels=(16, 32, 64, 128, 256), strides=(2, 2, 2, 2), num_res_units=2)
    return net, (2, 1, 32, 32, 32)


ALL_MODELS = {**MODELS, "MONAI 3D UNet": unet}


def compare(world: World, name: str, num_steps: int) -> dict[str, list[float]]:
    """Return seconds per step of every side, round by round."""
    build = ALL_MODELS[name]

    def side(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], float]:
        torch.manual_seed(0)
        plain, shape = build()
        model = wrap(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
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
        "rankwise": side(rw.replicate),
        "ddp": side(DistributedDataParallel),
        "none": side(lambda model: model),
    }
    interleaved(sides, WARM_UP_ROUNDS)
    return interleaved(sides, ROUNDS)


def measure(name: str, num_ranks: int) -> list[Row]:
    """Return the rows of one model."""
    num_steps = 10 if name == "60 small layers" else 3
    figures = run_ranks(compare, num_ranks, name, num_steps, timeout_seconds=900)[0].get()
    return [
        Row(
            f"step, {name}, {num_ranks} ranks, against {words}",
            seconds(statistics.median(figures["rankwise"])),
            seconds(statistics.median(figures[peer])),
            median_ratio(figures["rankwise"], figures[peer]),
            limit,
        )
        for peer, words, limit in (("ddp", "DDP", REACH[name][0]), ("none", "no exchange", REACH[name][1]))
    ]


if __name__ == "__main__":
    chosen = [name for name in ALL_MODELS if any(word in name for word in sys.argv[1:])] or list(ALL_MODELS)
    show([row for name in chosen for num_ranks in (2, 4) for row in measure(name, num_ranks)])
