# SPDX-License-Identifier: Apache-2.0
"""`rankwise.all_reduce` between the ranks of one host, against `torch.distributed.all_reduce` over Gloo.

Both run in the same processes in turn, one thread per rank. Ours returns a new tensor; torch's works in place. And
Horovod's `allreduce`, whose ranks compare names first, of ten numbers, against `rankwise.all_reduce`.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from measure import Row, interleaved, median_ratio, seconds, show

import rankwise as rw
import rankwise.compat.horovod as hvd
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


def timed(call: Callable[[], object], num_calls: int) -> Callable[[], float]:
    """Return what gives the seconds of a call."""

    def calls() -> float:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(num_calls):
            call()
        return (time.perf_counter() - started) / num_calls

    return calls


def compare(_: World, num_bytes: int, num_calls: int) -> dict[str, list[float]]:
    """Return seconds per call of both, round by round."""
    tensor = torch.randn(num_bytes // 4)

    def in_place() -> None:
        tensor.fill_(1.0)  # repeated sums would overflow
        dist.all_reduce(tensor)

    sides = {"rankwise": timed(lambda: rw.all_reduce(tensor), num_calls), "gloo": timed(in_place, num_calls)}
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


def compare_horovod(_: World) -> dict[str, list[float]]:
    """Return seconds per call of both, round by round."""
    hvd.init()
    tensor = torch.randn(10)
    sides = {
        "horovod": timed(lambda: hvd.allreduce(tensor, name="x"), 100),
        "rankwise": timed(lambda: rw.all_reduce(tensor), 100),
    }
    interleaved(sides, 2)
    return interleaved(sides, ROUNDS)


def measure_horovod() -> Row:
    """Return the row of Horovod's words."""
    figures = run_ranks(compare_horovod, 2, timeout_seconds=600)[0].get()
    return Row(
        "hvd.allreduce of 40 bytes, 2 ranks, against rankwise.all_reduce",
        seconds(statistics.median(figures["horovod"])),
        seconds(statistics.median(figures["rankwise"])),
        median_ratio(figures["horovod"], figures["rankwise"]),
        1.5,
    )


if __name__ == "__main__":
    show([measure(name, num_ranks) for name in SIZES for num_ranks in (2, 4)] + [measure_horovod()])
