# SPDX-License-Identifier: Apache-2.0
"""Trains as a tutorial for Slurm has it: DistributedDataParallel, and ranks by Slurm's variables, where there are some.

Arguments: the file for rank 0's weights, and a folder for what each rank sees of Slurm.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train() -> DistributedDataParallel:
    """Be one rank, and return its model: torch may never free one after its group, which torchrun leaves as it is."""
    rank = int(os.environ.get("SLURM_PROCID", os.environ["RANK"]))
    world_size = int(os.environ.get("SLURM_NTASKS", os.environ["WORLD_SIZE"]))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(12, 3)
    for _ in range(5):
        optimizer.zero_grad()
        part = inputs[rank::world_size]
        (model(part) - part.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), sys.argv[1])
    dist.barrier()
    dist.destroy_process_group()
    return model


def note(folder: Path) -> None:
    """Write down this rank's variables, and which tasks a srun of its own starts."""
    nested = subprocess.run(
        ["srun", "--overlap", "sh", "-c", "echo $SLURM_PROCID of $SLURM_NTASKS"],
        capture_output=True,
        text=True,
        check=False,
    )
    seen = {name: value for name, value in os.environ.items() if "SLURM_" in name}
    said = {"variables": seen, "nested": sorted(nested.stdout.splitlines()), "errors": nested.stderr}
    (folder / f"{os.environ['SLURM_PROCID']}.json").write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    trained = train()
    if len(sys.argv) > 2:
        note(Path(sys.argv[2]))
