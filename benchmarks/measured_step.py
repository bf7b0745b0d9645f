# SPDX-License-Identifier: Apache-2.0
"""Cost of measuring where the time of a step goes: on and off by turns, in the same processes."""

from __future__ import annotations

import random
import tempfile
import time
from statistics import median
from typing import TYPE_CHECKING

import torch
from measure import Row, seconds, show
from models import MODELS

import rankwise as rw
from rankwise import meter
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from rankwise.world.facts import World

NAME = "60 small layers"
STEPS, WARM_UP = 6000, 40
REACH = 1.01


def measured(world: World, folder: str) -> dict[str, list[float]]:
    """Return seconds per step with and without measuring, of one model whose steps draw lots which it is.

    Turns of many steps would measure the machine, whose speed changes by more than what is sought; and two models of
    one shape differ by 2 %, by where they lie in memory. A step after one of the other side does not count: to the
    meter, the step before it has lasted for all those without measuring.
    """
    torch.set_num_threads(1)
    rw.leave()
    store = f"file://{folder}/store-{world.world_size}"
    with rw.join(init_method=store, rank=world.rank, world_size=world.world_size, report=folder):
        measuring = meter.current
        if meter.is_silent():
            raise RuntimeError("steps are not measured")
        model, shape = MODELS[NAME]()
        rw.replicate(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        x = torch.randn(shape)
        draw = random.Random(0)
        found: dict[str, list[float]] = {"with": [], "without": []}
        before = ""
        for number in range(STEPS + WARM_UP):
            side = draw.choice(("with", "without"))
            if side == "without":
                meter.pause()
            rw.barrier()
            started = time.perf_counter()
            # With measuring, the forward pass also records the step before.
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number >= WARM_UP and side == before:
                found[side].append(time.perf_counter() - started)
            meter.start(measuring)
            before = side
        return found


def main() -> None:
    rows = []
    for num_ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(measured, num_ranks, folder, timeout_seconds=900)[0].get()
        ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
        medians = [median(found[side]) for side in ("with", "without")]
        rows.append(
            Row(
                f"measured step, {ranks}, {NAME}, against not measured",
                *map(seconds, medians),
                medians[0] / medians[1],
                REACH,
            )
        )
    show(rows)


if __name__ == "__main__":
    main()
