# SPDX-License-Identifier: Apache-2.0
"""One training step of a pipeline on 2 ranks: rankwise against a hand-written torch.distributed.pipelining loop.

Both have the same split, micro-batches and schedule (1F1B), and run in the same processes, turn by turn, one thread
per rank. The figure is the median over turns of the time per step, from the moment both ranks have come.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from measure import Row, interleaved, median_ratio, seconds, show
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from rankwise.pipeline.pipeline import pipeline
from rankwise.replicate.device_mesh import mesh, submesh
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World

NUM_RANKS = 2
MICRO_BATCHES = 4
REPETITIONS = 40
REACH = 1.02


def convolutions() -> nn.Sequential:
    """Return 8 convolutions of 32 channels."""
    layers = [m for _ in range(7) for m in (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), *layers)


def many_small() -> nn.Sequential:
    """Return 24 linear layers of 256 by 256."""
    return nn.Sequential(*[m for _ in range(24) for m in (nn.Linear(256, 256), nn.ReLU())])


def wide() -> nn.Sequential:
    """Return 6 linear layers of 1024 by 1024: activations of 256 KB per micro-batch between the stages."""
    return nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(1024, 1024), nn.ReLU())])


CASES: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...], int]] = {
    "8 convolutions": (convolutions, (3, 32, 32), 32),
    "24 small layers": (many_small, (256,), 256),
    "wide MLP": (wide, (1024,), 256),
}
"""Model, shape of a sample, samples per step."""


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def compare(world: World, name: str, repetitions: int) -> dict[str, list[float]]:
    """Return seconds per step of both sides, turn by turn."""
    build, shape, batch_size = CASES[name]
    mesh(pp=NUM_RANKS)
    torch.manual_seed(0)
    model, peer = build(), build()
    x = torch.randn(batch_size, *shape)
    with torch.no_grad():
        y = torch.randn_like(model(x))
    middle = len(model) // 2

    half = peer[:middle] if world.rank == 0 else peer[middle:]
    stage = PipelineStage(half, world.rank, NUM_RANKS, torch.device("cpu"), group=submesh("pp").get_group())
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=mean_square)
    peer_optimizer = torch.optim.SGD(half.parameters(), lr=1e-3)

    def by_hand() -> float:
        dist.barrier()
        started = time.perf_counter()
        if world.rank == 0:
            schedule.step(x, return_outputs=False)
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=y, losses=losses, return_outputs=False)
            torch.stack(losses).mean()
        peer_optimizer.step()
        peer_optimizer.zero_grad()
        return time.perf_counter() - started

    step = pipeline(model, mean_square, example=x, micro_batches=MICRO_BATCHES, split=[str(middle)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def ours() -> float:
        dist.barrier()
        started = time.perf_counter()
        step(x, y)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started

    sides = {"rankwise": ours, "torch": by_hand}
    interleaved(sides, 3)
    return interleaved(sides, repetitions)


def measure(name: str) -> Row:
    """Return the row of one model."""
    figures = run_ranks(compare, NUM_RANKS, name, REPETITIONS, timeout_seconds=600)[0].get()
    return Row(
        f"pipeline step, {name}, {NUM_RANKS} ranks, against torch.distributed.pipelining",
        seconds(statistics.median(figures["rankwise"])),
        seconds(statistics.median(figures["torch"])),
        median_ratio(figures["rankwise"], figures["torch"]),
        REACH,
    )


if __name__ == "__main__":
    show([measure(name) for name in CASES])
