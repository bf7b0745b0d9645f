# SPDX-License-Identifier: Apache-2.0
"""`rankwise.all_reduce` between the ranks of one host, against `torch.distributed.all_reduce` over Gloo.

Both run in the same processes in turn, one thread per rank. Ours returns a new tensor; torch's works in place.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from measure import Row, interleaved, median_ratio, seconds, show

import rankwise as rw
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World

SIZES = {
    "4 kB": (2**12, 100, 1.0),
    "1 MB": (2**20, 10, 0.5),
    "25 MB": (25 * 2**20, 2, 0.5),
    "100 MB": (100 * 2**20, 1, 0.5),
}
"""Bytes, calls per round, and the ratio to stay at or below."""
ROUNDS = 15


def compare(_: World, num_bytes: int, num_calls: int) -> dict[str, list[float]]:
    """Return seconds per call of both, round by round."""
    tensor = torch.randn(num_bytes // 4)

    def timed(call: Callable[[], object]) -> Callable[[], float]:
        def calls() -> float:
            dist.barrier()
            started = time.perf_counter()
            for _ in range(num_calls):
                call()
            return (time.perf_counter() - started) / num_calls

        return calls

    def in_place() -> None:
        tensor.fill_(1.0)  # repeated sums would overflow
        dist.all_reduce(tensor)

    sides = {"rankwise": timed(lambda: rw.all_reduce(tensor)), "gloo": timed(in_place)}
    interleaved(sides, 2)
    return interleaved(sides, ROUNDS)


def measure(name: str, num_ranks: int) -> Row:
    """Return the row of one size."""
    num_bytes, num_calls, reach = SIZES[name]
    figures = run_ranks(compare, num_ranks, num_bytes, num_calls, timeout_seconds=600)[0].get()
    return Row(
        f"all_reduce of {name}, {num_ranks} ranks, against Gloo",
        seconds(statistics.median(figures["rankwise"])),
        seconds(statistics.median(figures["gloo"])),
        median_ratio(figures["rankwise"], figures["gloo"]),
        reach,
    )


if __name__ == "__main__":
    show([measure(name, num_ranks) for name in SIZES for num_ranks in (2, 4)])
