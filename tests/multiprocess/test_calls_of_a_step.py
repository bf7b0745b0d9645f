# SPDX-License-Identifier: Apache-2.0
"""How much of rankwise's Python a step, a collective and a save call: what they cost, and what a reader has to follow.

The limits only go down. ``pytest -s`` prints the tables.
"""

from __future__ import annotations

import re
from functools import reduce
from operator import and_
from pathlib import Path
from typing import TYPE_CHECKING

import calls
import torch
from torch import nn
from torch.utils.data import TensorDataset

import rankwise as rw
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from rankwise.world.facts import World

ROOT = Path(__file__).parents[2]
NUM_STEPS = 40
FIRST_COUNTED = 8
"""By now buckets are laid out, kinds of calls are known, and checks of first steps are done."""
LIMITS = {"step": (185, 33), "all_reduce": (36, 9), "save": (560, 32)}
"""Calls and files of each, with room for what a rank asks while it waits for a slow one."""


def counts(_: World, folder: str) -> dict[str, calls.Calls]:
    """Return the calls of each, on this rank."""
    torch.manual_seed(0)
    model = rw.replicate(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    dataset = TensorDataset(torch.randn(8 * NUM_STEPS, 8), torch.randn(8 * NUM_STEPS, 1))
    batches = iter(rw.DataLoader(dataset, global_batch_size=8))

    def step() -> None:
        inputs, targets = next(batches)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    steps = [calls.counted(step) for _ in range(NUM_STEPS)][FIRST_COUNTED:]
    numbers = torch.ones(3)
    sums = [calls.counted(lambda: rw.all_reduce(numbers)) for _ in range(NUM_STEPS)]
    checkpoints = rw.Checkpointer(folder, keep=1)
    saves = [calls.counted(lambda: checkpoints.save(model=model, optimizer=optimizer)) for _ in range(6)]
    return {"step": _of_each(steps), "all_reduce": _of_each(sums), "save": _of_each(saves[1:])}


def _of_each(repetitions: list[calls.Calls]) -> calls.Calls:
    """Return the calls that each repetition makes: a rank that waits for another asks again whether it has arrived."""
    return reduce(and_, repetitions)


def test_calls_and_files(tmp_path: Path) -> None:
    """No more than their limits."""
    of_rank_0 = run_ranks(counts, 2, str(tmp_path), timeout_seconds=120)[0].get()

    for name, counted in of_rank_0.items():
        print(calls.table(name, counted))  # noqa: T201 - shown by pytest -s
    measured = {name: (counted.total(), len(calls.files(counted))) for name, counted in of_rank_0.items()}
    assert set(calls.files(of_rank_0["step"])) == _walked(), "docs/architecture.md walks other files"
    assert all(a <= b for name in LIMITS for a, b in zip(measured[name], LIMITS[name], strict=True)), measured


def _walked() -> set[str]:
    """Return the files that docs/architecture.md says a step passes: the first column of its table."""
    section = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## From a batch to a step")[1]
    rows = [line.split(" | ")[0] for line in section.split("\n## ")[0].splitlines() if line.startswith("| `")]
    found: set[str] = set()
    for name in re.findall(r"`([^`]+)`", " ".join(rows)):
        folder, _, names = name.partition("{")
        found |= {f"{folder}{one.strip()}.py" for one in names.rstrip("}").split(",")}
    return found
