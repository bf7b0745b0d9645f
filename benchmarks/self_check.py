# SPDX-License-Identifier: Apache-2.0
"""Cost of the gradient check on an untested torch, in the first call and step of each strategy."""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING

import torch
from measure import interleaved, machine
from torch import nn

import rankwise as rw
from rankwise import testing
from rankwise.world import torch_versions

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World

REPETITIONS = 7
RANKS = {"shard": 2, "tensor_parallel": 2, "pipeline": 2, "place": 1}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 64))


def sharded(x: torch.Tensor) -> None:
    rw.shard(net())(x).sum().backward()


def tensor_parallel(x: torch.Tensor) -> None:
    rw.tensor_parallel(net())(x).sum().backward()


def pipeline(x: torch.Tensor) -> None:
    rw.pipeline(net(), nn.functional.mse_loss, example=x)(x, x)


def placed(x: torch.Tensor) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rw.place(net(), {"": "cpu", "3": "disk"}, offload_folder=folder)(x).sum().backward()


FIRST_USE: dict[str, Callable[[torch.Tensor], None]] = {
    "shard": sharded,
    "tensor_parallel": tensor_parallel,
    "pipeline": pipeline,
    "place": placed,
}


def first_use(_: World, strategy: str, *, checks: bool) -> float:
    """Return how long a process's first call of a strategy and first step took, in seconds."""
    if checks:
        torch_versions.TESTED = ((0, 0),)
    started = time.perf_counter()
    FIRST_USE[strategy](torch.ones(8, 64))
    return time.perf_counter() - started


def slowest(strategy: str, ranks: int, *, checks: bool) -> float:
    """Return the same of the slowest of so many new ranks."""
    results = testing.run_ranks(partial(first_use, strategy=strategy, checks=checks), ranks)
    return max(result.get() for result in results)


def main() -> None:
    print(machine())
    print("strategy, ranks: first call and step without the check, with it, what the check adds (medians)")
    for strategy, ranks in RANKS.items():
        sides = {name: partial(slowest, strategy, ranks, checks=name == "with it") for name in ("without", "with it")}
        found = interleaved(sides, REPETITIONS)
        adds = statistics.median(a - b for a, b in zip(found["with it"], found["without"], strict=True))
        medians = [f"{1000 * statistics.median(found[name]):.0f} ms" for name in sides]
        print(f"{strategy}, {ranks}: {', '.join(medians)}, {1000 * adds:.0f} ms")


if __name__ == "__main__":
    main()
