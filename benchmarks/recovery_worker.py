# SPDX-License-Identifier: Apache-2.0
"""One rank that `recovery.py` kills or stops: takes small steps and exchanges gradients until told to stop.

Arguments: ``rankwise`` or ``torch``, and a folder, in which a file ``stop`` ends the job. Rank 0 appends a line to
``steps`` for each step: attempt, number of ranks, seconds since the epoch. Every rank leaves its process number in
``ATTEMPT-RANK.pid``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rankwise as rw

if TYPE_CHECKING:
    from torch import nn

STEP_SECONDS = 0.02
"""The rest between steps: times to the next step are no finer than this, and steps do not fill the cores."""


def steps(model: nn.Module, folder: Path, attempt: str, rank: int, world_size: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    stopping = torch.zeros(1)
    while not stopping.item():
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            with (folder / "steps").open("a", encoding="utf-8") as file:
                file.write(f"{attempt} {world_size} {time.time()}\n")
            stopping.fill_(float((folder / "stop").exists()))
        dist.broadcast(stopping, 0)
        time.sleep(STEP_SECONDS)


def main(mode: str, folder: Path) -> None:
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    attempt = os.environ["RANKWISE_ATTEMPT" if mode == "rankwise" else "TORCHELASTIC_RESTART_COUNT"]
    (folder / f"{attempt}-{rank}.pid").write_text(str(os.getpid()), encoding="utf-8")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    if mode == "rankwise":
        with rw.join() as world:
            steps(rw.replicate(model), folder, attempt, world.rank, world.world_size)
    else:
        dist.init_process_group("gloo")
        steps(DistributedDataParallel(model), folder, attempt, dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
