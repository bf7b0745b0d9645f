# SPDX-License-Identifier: Apache-2.0
"""One training step on 2 ranks, whole loop: rankwise against a hand-written DistributedDataParallel loop.

Both run in the same processes, epoch by epoch in turn, one thread per rank. The time of an epoch includes its
loader; the figure is the median over epochs of the time per step.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from measure import Row, interleaved, median_ratio, seconds, show
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import rankwise as rw
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rankwise.world.facts import World

NUM_RANKS = 2
REPETITIONS = 40
REACH = 1.0


class ConvNet(nn.Module):
    """The net of examples/digits.py."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(torch.max_pool2d(self.conv1(x), 2))
        x = torch.relu(torch.max_pool2d(self.conv2(x), 2))
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


def many_small() -> nn.Module:
    """Return 60 linear layers of 64 by 64."""
    return nn.Sequential(*[m for _ in range(60) for m in (nn.Linear(64, 64), nn.ReLU())])


def wide() -> nn.Module:
    """Return 6 linear layers of 1024 by 1024: 25 MB of gradients."""
    return nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(1024, 1024), nn.ReLU())])


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "conv net": (ConvNet, (1, 28, 28), 64, 12),
    "60 small layers": (many_small, (64,), 32, 20),
    "wide MLP": (wide, (1024,), 64, 5),
}
"""Model, shape of a sample, samples per rank and step, steps per epoch."""


def compare(_: World, name: str) -> dict[str, list[float]]:
    """Return seconds per step of both sides, epoch by epoch."""
    build, shape, local_batch_size, num_steps = CASES[name]
    torch.manual_seed(0)
    inputs = torch.randn(local_batch_size * NUM_RANKS * num_steps, *shape)
    dataset = TensorDataset(inputs)

    def epoch_of(model: nn.Module, loader: Iterable[Any], new_epoch: Callable[[], None]) -> Callable[[], float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def epoch() -> float:
            new_epoch()
            dist.barrier()
            started = time.perf_counter()
            for (x,) in loader:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return (time.perf_counter() - started) / num_steps

        return epoch

    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    numbers = iter(range(10**9))
    sides = {
        "rankwise": epoch_of(
            rw.replicate(build()),
            rw.DataLoader(dataset, local_batch_size=local_batch_size, shuffle=True),
            lambda: None,
        ),
        "ddp": epoch_of(
            DistributedDataParallel(build()),
            DataLoader(dataset, batch_size=local_batch_size, sampler=sampler),
            lambda: sampler.set_epoch(next(numbers)),
        ),
    }
    interleaved(sides, 3)
    return interleaved(sides, REPETITIONS)


def measure(name: str) -> Row:
    """Return the row of one model."""
    figures = run_ranks(compare, NUM_RANKS, name, timeout_seconds=600)[0].get()
    return Row(
        f"training step, {name}, {NUM_RANKS} ranks, against DDP",
        seconds(statistics.median(figures["rankwise"])),
        seconds(statistics.median(figures["ddp"])),
        median_ratio(figures["rankwise"], figures["ddp"]),
        REACH,
    )


if __name__ == "__main__":
    show([measure(name) for name in CASES])
