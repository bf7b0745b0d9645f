# SPDX-License-Identifier: Apache-2.0
"""One training step of a sharded model: rankwise.shard against a hand-written fully_shard loop with the same blocks.

Both run in the same processes, a few steps in turn, one thread per rank. rankwise gathers and reduces in shared memory,
and adds the exchange of weights and of which parameters were used.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from measure import Row, interleaved, median_ratio, seconds, show
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rankwise as rw
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World

REPETITIONS = 30
REACH = 0.95


def transformer() -> nn.Module:
    """Return 6 encoder layers of width 256: 19 MB of parameters."""
    return nn.Sequential(*[nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True) for _ in range(6)])


def wide() -> nn.Module:
    """Return 6 linear layers of 1024 by 1024: 25 MB of parameters."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(6)])


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "6 encoder layers": (transformer, (16, 32, 256), 2, 3),
    "wide MLP": (wide, (64, 1024), 2, 4),
    "wide MLP, 4 ranks": (wide, (64, 1024), 4, 3),
}
"""Model, shape of a rank's batch, ranks, steps at a time."""


def compare(world: World, name: str) -> dict[str, list[float]]:
    """Return seconds per step of both sides, turn by turn."""
    build, shape, num_ranks, num_steps = CASES[name]
    torch.manual_seed(0)
    ours = rw.shard(build(), blocks=[str(number) for number in range(6)])
    torch.manual_seed(0)
    theirs = build()
    mesh = init_device_mesh("cpu", (num_ranks,))
    for block in theirs:
        fully_shard(block, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(world.rank))

    def steps_of(model: nn.Module) -> Callable[[], float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def steps() -> float:
            dist.barrier()
            started = time.perf_counter()
            for _ in range(num_steps):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return (time.perf_counter() - started) / num_steps

        return steps

    sides = {"rankwise": steps_of(ours), "fully_shard": steps_of(theirs)}
    interleaved(sides, 3)
    return interleaved(sides, REPETITIONS)


def measure(name: str) -> Row:
    """Return the row of one model."""
    num_ranks = CASES[name][2]
    figures = run_ranks(compare, num_ranks, name, timeout_seconds=600)[0].get()
    return Row(
        f"training step of a sharded model, {name.partition(',')[0]}, {num_ranks} ranks, against fully_shard",
        seconds(statistics.median(figures["rankwise"])),
        seconds(statistics.median(figures["fully_shard"])),
        median_ratio(figures["rankwise"], figures["fully_shard"]),
        REACH,
    )


if __name__ == "__main__":
    show([measure(name) for name in CASES])
