# SPDX-License-Identifier: Apache-2.0
"""Trains, saving each epoch, and writes each rank's state into a folder; a rank may end its node of Ray on the way.

Arguments: the folder; the rank that kills its node in the second epoch of the first attempt.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import rankwise as rw
from rankwise.world.processes import stat_of


def kill_node() -> None:
    """Kill the daemon of the node that this process runs on, as the loss of the machine would."""
    pid = os.getpid()
    while (stat := stat_of(pid)) is not None and stat.name != "raylet":
        pid = stat.parent
    os.kill(pid, signal.SIGKILL)


def main(folder: Path, kills: int | None = None) -> None:
    """Train."""
    with rw.join() as world:
        torch.manual_seed(3)
        x, y = torch.randn(37, 5, dtype=torch.float64), torch.randn(37, 2, dtype=torch.float64)
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 2)).double()
        model = rw.replicate(model, sync_batchnorm=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        loader = rw.DataLoader(TensorDataset(x, y), global_batch_size=7, shuffle=True)
        checkpoints = rw.Checkpointer(folder / "checkpoints")
        checkpoints.restore(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(loader.epoch, 3):
            for x_part, y_part in loader:
                nn.functional.mse_loss(model(x_part), y_part).backward()
                optimizer.step()
                optimizer.zero_grad()
                if epoch == 1 and world.rank == kills and os.environ.get("RANKWISE_ATTEMPT") == "0":
                    kill_node()
                    kills = None
            checkpoints.save(model=model, optimizer=optimizer, loader=loader)
        attempt = os.environ.get("RANKWISE_ATTEMPT")
        facts = {"size": world.world_size, "nodes": world.num_nodes, "attempt": attempt, "source": world.source}
        torch.save({"state": model.state_dict(), **facts}, folder / f"{world.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
