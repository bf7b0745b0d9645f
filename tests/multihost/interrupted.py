# SPDX-License-Identifier: Apache-2.0
"""The script of a job that is stopped and resumed: trains from the newest checkpoint, slowly until notified.

Argument: the folder. Rank 0 says in ``begun`` that a run is under way; the file ``hurry`` ends the waiting between
steps; each rank writes what it came to, which tests compare with the one-rank run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import rankwise as rw
from rankwise.testing import run_ranks

EPOCHS = 40
NUM_SAMPLES = 61
STEP_SECONDS = 0.03
"""How long a step takes at least, so that a run is stopped before it ends."""
STEPS_BEFORE_BEGUN = 4
Parameters = dict[str, torch.Tensor]
TOLERANCE = 1e-10


def train(world: rw.World, folder: Path | None = None) -> Parameters:
    """Train a small model and return its state."""
    torch.manual_seed(0)
    x, y = torch.randn(NUM_SAMPLES, 5, dtype=torch.float64), torch.randn(NUM_SAMPLES, 2, dtype=torch.float64)
    model = rw.replicate(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = rw.DataLoader(TensorDataset(x, y), global_batch_size=7, shuffle=True)
    if folder is not None:
        rw.Checkpointer(folder / "net").restore(model=model, optimizer=optimizer, loader=loader)
    num_steps = 0
    for _ in range(loader.epoch, EPOCHS):
        for x_part, y_part in loader:
            nn.functional.mse_loss(model(x_part), y_part).backward()
            optimizer.step()
            optimizer.zero_grad()
            num_steps += 1
            if folder is not None and not (folder / "hurry").exists():
                time.sleep(STEP_SECONDS)
                if world.rank == 0 and num_steps == STEPS_BEFORE_BEGUN:
                    (folder / "begun").touch()
    return {key: value.clone() for key, value in model.state_dict().items()}


def largest_difference(left: Parameters, right: Parameters) -> float:
    """Return the largest difference, relative to the largest element of each tensor."""
    return max(((left[k] - right[k]).abs().max() / right[k].abs().max().clamp(min=1e-3)).item() for k in right)


def check_resumed(folder: Path, num_ranks: int) -> None:
    """Hold what the interrupted run came to against the undisturbed one of one rank."""
    expected = run_ranks(train, 1)[0].get()
    for rank in range(num_ranks):
        assert largest_difference(torch.load(folder / f"{rank}.pt"), expected) < TOLERANCE


if __name__ == "__main__":
    with rw.join() as joined:
        where = Path(sys.argv[1])
        torch.save(train(joined, where), where / f"{joined.rank}.pt")
