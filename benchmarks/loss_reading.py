# SPDX-License-Identifier: Apache-2.0
"""Cost of reading each loss and reporting it to the other ranks, in a training step on 2 ranks.

Both sides train one model in the same processes, in turn, one thread per rank. The other side takes every loss for a
mean over samples, without looking at it.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from measure import Row, interleaved, machine, median_ratio, seconds, show
from models import MODELS
from torch.nn import functional

import rankwise as rw
from rankwise.replicate.strategy_registry import strategy_of
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World

NUM_RANKS = 2
REACH = {"60 small layers": 1.03, "transformer": 1.01}
REPETITIONS = {"60 small layers": 100, "transformer": 40}
NUM_STEPS = {"60 small layers": 5, "transformer": 1}

LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a mean": functional.mse_loss,
    "a sum": lambda output, target: (output - target).square().sum(),
    "a masked mean": lambda output, target: ((output - target).square() * (target > 0)).sum() / (target > 0).sum(),
    "two terms": lambda output, target: functional.mse_loss(output, target) + 0.1 * functional.l1_loss(output, target),
}


def compare(_: World, name: str) -> dict[str, dict[str, list[float]]]:
    """Return seconds per step of both sides, for each loss."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    plain = torch.autograd.backward
    model, shape = MODELS[name]()
    rw.replicate(model)
    reading = torch.autograd.backward
    on_ranks = strategy_of(model).loss  # type: ignore[union-attr] # a replicated model's
    report = on_ranks.report
    x, target = torch.randn(shape), torch.randn(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def steps(loss: str, *, reads: bool) -> float:
        torch.autograd.backward = reading if reads else plain
        on_ranks.report = report if reads else lambda: None
        dist.barrier()
        started = time.perf_counter()
        for _ in range(NUM_STEPS[name]):
            LOSSES[loss](model(x), target).backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - started) / NUM_STEPS[name]

    found = {}
    for loss in LOSSES:
        sides = {"reads": partial(steps, loss, reads=True), "takes samples": partial(steps, loss, reads=False)}
        interleaved(sides, 3)
        found[loss] = interleaved(sides, REPETITIONS[name])
    torch.autograd.backward = reading
    on_ranks.report = report
    return found


def rows_of(name: str) -> list[Row]:
    """Return the rows of one model."""
    found = run_ranks(compare, NUM_RANKS, name, timeout_seconds=600)[0].get()
    return [
        Row(
            f"reading {loss}, {name}, {NUM_RANKS} ranks, against taking samples",
            seconds(statistics.median(figures["reads"])),
            seconds(statistics.median(figures["takes samples"])),
            median_ratio(figures["reads"], figures["takes samples"]),
            REACH[name],
        )
        for loss, figures in found.items()
    ]


def main() -> None:
    if "--json" not in sys.argv:
        print(machine())
    show([row for name in REACH for row in rows_of(name)])


if __name__ == "__main__":
    main()
