# SPDX-License-Identifier: Apache-2.0
"""Two hosts of two ranks over a link of 1 Gbit/s: two levels against flat Gloo between all ranks.

The hosts are network namespaces of this machine, so all four ranks share its cores. Needs root and iproute2.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from measure import Row, interleaved, median_ratio, seconds, show
from models import MODELS
from torch.nn.parallel import DistributedDataParallel

import rankwise as rw

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

MBIT = 1000
ROUNDS = 7
NUM_BYTES = 25 * 2**20


def _timed(call: Callable[[], object]) -> Callable[[], float]:
    def once() -> float:
        dist.barrier()
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return once


def _training(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
    torch.manual_seed(0)
    plain, shape = MODELS["wide MLP"]()
    model = wrap(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(shape)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def run_rank() -> None:
    """Measure on this rank, and print the figures."""
    torch.set_num_threads(1)
    with rw.join():
        tensor = torch.randn(NUM_BYTES // 4)
        cases = {
            "all_reduce of 25 MB": (lambda: rw.all_reduce(tensor), lambda: dist.all_reduce(tensor.clone())),
            "step, wide MLP": (_training(rw.replicate), _training(DistributedDataParallel)),
        }
        figures = {}
        for name, (ours, flat) in cases.items():
            sides = {"rankwise": _timed(ours), "flat": _timed(flat)}
            interleaved(sides, 2)
            figures[name] = interleaved(sides, ROUNDS)
        print(json.dumps(figures))


def measure() -> list[Row]:
    """Return the rows."""
    # The hosts that the tests use, too.
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "multihost"))
    from hosts import Hosts  # noqa: PLC0415 - found just now

    with Hosts(2, mbit=MBIT) as hosts:
        first, *_ = hosts.run_ranks(Path(__file__), 2, "--rank", timeout_seconds=300)
    figures = json.loads(first.stdout.strip().splitlines()[-1])
    return [
        Row(
            f"{name}, 2 hosts of 2 ranks at 1 Gbit/s, against flat Gloo",
            seconds(statistics.median(times["rankwise"])),
            seconds(statistics.median(times["flat"])),
            median_ratio(times["rankwise"], times["flat"]),
            1.0,
        )
        for name, times in figures.items()
    ]


if __name__ == "__main__":
    if "--rank" in sys.argv:
        run_rank()
    else:
        show(measure())
