# SPDX-License-Identifier: Apache-2.0
"""The script of ranks whose job is disturbed: trains, saves after every step, and resumes there after a restart.

Arguments: a folder all ranks share, and what happens in the fourth step of the first attempt: ``kill`` or ``stop``
this job's last rank, ``wait`` for the file ``go`` (and again two steps later, in the second attempt), or ``nothing``.
Into the folder go ``steps`` (a line for each step taken: attempt, number of ranks, step, seconds since the epoch),
``reached``, and ``final.pt``. Tests import ``train``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.data import TensorDataset

import rankwise as rw

if TYPE_CHECKING:
    from rankwise.world.facts import World

NUM_SAMPLES = 47
GLOBAL_BATCH_SIZE = 6
EPOCHS = 2
HURT_AT_STEP = 4


def train(world: World, folder: Path, what: str) -> dict[str, torch.Tensor]:
    """Train from the newest checkpoint to the end."""
    torch.manual_seed(3)
    x = torch.randn(NUM_SAMPLES, 5, dtype=torch.float64)
    y = torch.randn(NUM_SAMPLES, 2, dtype=torch.float64)
    model = rw.replicate(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = rw.DataLoader(
        TensorDataset(x, y), global_batch_size=GLOBAL_BATCH_SIZE, shuffle=True, seed=5, remainder="keep"
    )
    checkpoints = rw.Checkpointer(folder / "checkpoints", keep=2)
    checkpoints.restore(model=model, optimizer=optimizer, loader=loader)
    attempt = os.environ.get("RANKWISE_ATTEMPT", "0")
    for _ in range(loader.epoch, EPOCHS):
        for x_part, y_part in loader:
            step = _num_lines(folder / "steps") + 1
            nn.functional.mse_loss(model(x_part), y_part).backward()
            if (attempt, step) in {("0", HURT_AT_STEP), ("1", HURT_AT_STEP + 2)}:
                _hurt(world, folder, what if attempt == "0" or what == "wait" else "nothing")
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(model=model, optimizer=optimizer, loader=loader)
            if world.is_rank_zero:
                with (folder / "steps").open("a", encoding="utf-8") as file:
                    file.write(f"{attempt} {world.world_size} {step} {time.time()}\n")
            rw.barrier()
    return {key: value.clone() for key, value in model.state_dict().items()}


def _num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def _hurt(world: World, folder: Path, what: str) -> None:
    is_last = world.rank == world.world_size - 1
    if is_last:
        (folder / "reached").write_text(f"{time.time()}\n", encoding="utf-8")
    if is_last and what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if is_last and what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while what == "wait" and not (folder / "go").exists():
        time.sleep(0.01)


def main(folder: Path, what: str) -> None:
    """Do what the arguments say."""
    torch.set_num_threads(1)
    with rw.join() as world:
        state = train(world, folder, what)
        if world.is_rank_zero:
            torch.save(state, folder / "final.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
