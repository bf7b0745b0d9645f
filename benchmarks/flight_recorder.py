# SPDX-License-Identifier: Apache-2.0
"""Cost of recording the last collectives: a training step on two ranks with the record and without it.

Both sides run in the same processes, a few steps at a time in turn, one thread per rank. The difference is far below
what a step varies by, so the cost of one record is measured too, and set against the step that has so many.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from measure import Row, interleaved, median_ratio, seconds, show
from models import MODELS

import rankwise as rw
from rankwise.comm.session import current
from rankwise.health.flight_recorder import FlightRecorder, Ticket
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World

NUM_RANKS = 2
ROUNDS = 60
WARM_UP_ROUNDS = 4
NUM_RECORDS = 20_000
HOOK_DEPTH = 9
"""How many calls of rankwise's and torch's are between ``loss.backward()`` and the record."""
IN_A_HOOK = """
def call(depth, begin, number, clock):
    if depth:
        return call(depth - 1, begin, number, clock)
    for _ in range(number):
        begin("gradients").ended = clock()
"""
REACH = 1.01
"""The ratio to stay at or below."""


class _NoRecord(FlightRecorder):
    """Numbers collectives, which they need, and remembers nothing."""

    def begin(self, what: str, exchange_id: int = 0) -> Ticket:
        self.last += 1
        self.counts[exchange_id] += 1
        return Ticket(self.last, what, exchange_id, self.counts[exchange_id])


def compare(world: World, name: str, num_steps: int) -> tuple[dict[str, list[float]], float, float]:
    """Return seconds per step of both sides, seconds per record, and records per step."""
    plain, shape = MODELS[name]()
    model = rw.replicate(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(world.rank)
    batch = torch.randn(shape)
    detector = current().detector
    if detector is None:
        raise RuntimeError("a world of one records nothing")

    def side(kind: type[FlightRecorder]) -> Callable[[], float]:
        def steps() -> float:
            # One record for both sides, because its numbers must continue: only its methods differ.
            detector.recorder.__class__ = kind
            dist.barrier()
            started = time.perf_counter()
            for _ in range(num_steps):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return (time.perf_counter() - started) / num_steps

        return steps

    sides = {"with": side(FlightRecorder), "without": side(_NoRecord)}
    interleaved(sides, WARM_UP_ROUNDS)
    before = detector.recorder.last
    figures = interleaved(sides, ROUNDS)
    per_step = (detector.recorder.last - before) / (2 * ROUNDS * num_steps)
    return figures, _of_one_record(), per_step


def _of_one_record() -> float:
    """Return the seconds that one record takes, from as deep below the user's line as a gradient hook is."""
    names: dict[str, Any] = {}
    exec(compile(IN_A_HOOK, rw.__file__, "exec"), names)  # noqa: S102 - as if rankwise held it
    started = time.perf_counter()
    names["call"](HOOK_DEPTH, FlightRecorder().begin, NUM_RECORDS, time.monotonic)
    return (time.perf_counter() - started) / NUM_RECORDS


def measure(name: str) -> list[Row]:
    """Return the rows of one model."""
    num_steps = 10 if name == "60 small layers" else 3
    figures, of_one, per_step = run_ranks(compare, NUM_RANKS, name, num_steps, timeout_seconds=600)[0].get()
    step = statistics.median(figures["without"])
    return [
        Row(
            f"step with the record, {name}, {NUM_RANKS} ranks",
            seconds(statistics.median(figures["with"])),
            seconds(step),
            median_ratio(figures["with"], figures["without"]),
            REACH,
        ),
        Row(
            f"{per_step:.0f} records of {seconds(of_one)}, {name}, of a step",
            seconds(step + per_step * of_one),
            seconds(step),
            1 + per_step * of_one / step,
            REACH,
        ),
    ]


if __name__ == "__main__":
    show([row for name in ("60 small layers", "wide MLP") for row in measure(name)])
