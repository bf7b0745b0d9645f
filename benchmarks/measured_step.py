# SPDX-License-Identifier: Apache-2.0
"""Cost of measuring where the time of a step goes: on and off by turns, in the same processes."""

from __future__ import annotations

import tempfile
import time
from typing import TYPE_CHECKING

import torch
from measure import Row, interleaved, median_ratio, seconds, show
from models import MODELS

import rankwise as rw
from rankwise.health import step_meter
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.health.step_meter import StepMeter
    from rankwise.world.facts import World

NAME = "60 small layers"
STEPS = 32
"""Of one turn."""
REPETITIONS = 40
REACH = 1.01


def sides_of(meter: StepMeter) -> dict[str, Callable[[], float]]:
    """Return what takes so many steps of one model with and without measuring, and returns the seconds of one.

    Of one model: two of the same shape differ by 2 % from each other, by where they lie in memory.
    """
    model, shape = MODELS[NAME]()
    rw.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(shape)

    def run() -> float:
        rw.barrier()
        started = time.perf_counter()
        for _ in range(STEPS):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - started) / STEPS

    def without() -> float:
        step_meter.pause()
        try:
            return run()
        finally:
            step_meter.start(meter)

    return {"with": run, "without": without}


def measured(world: World, folder: str) -> dict[str, list[float]]:
    """Return seconds per step with and without measuring."""
    torch.set_num_threads(1)
    rw.leave()
    store = f"file://{folder}/store-{world.world_size}"
    with rw.join(init_method=store, rank=world.rank, world_size=world.world_size, report=folder):
        meter = step_meter.current()
        if meter is None:
            raise RuntimeError("steps are not measured")
        sides = sides_of(meter)
        interleaved(sides, 4)
        return interleaved(sides, REPETITIONS)


def main() -> None:
    rows = []
    for num_ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(measured, num_ranks, folder, timeout_seconds=900)[0].get()
        ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
        medians = [seconds(sorted(found[side])[REPETITIONS // 2]) for side in ("with", "without")]
        ratio = median_ratio(found["with"], found["without"])
        rows.append(Row(f"measured step, {ranks}, {NAME}, against not measured", *medians, ratio, REACH))
    show(rows)


if __name__ == "__main__":
    main()
