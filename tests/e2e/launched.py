# SPDX-License-Identifier: Apache-2.0
"""The script of each rank under every launcher: trains a small model and writes the result into a folder.

Arguments: the folder; ``--local-rank`` or ``--local_rank``, as old tutorials have it; ``--spawn``, to start two ranks
by ``torch.multiprocessing`` that join three times.
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import rankwise as rw

Parameters = dict[str, torch.Tensor]


def train(_: rw.World) -> Parameters:
    """Train, and return the model's state."""
    torch.manual_seed(3)
    x, y = torch.randn(37, 5, dtype=torch.float64), torch.randn(37, 2, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 2)).double()
    model = rw.replicate(model, sync_batchnorm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = rw.DataLoader(TensorDataset(x, y), global_batch_size=7, shuffle=True)
    for _epoch in range(loader.epoch, 3):
        for x_part, y_part in loader:
            nn.functional.mse_loss(model(x_part), y_part).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {key: value.clone() for key, value in model.state_dict().items()}


def train_in(folder: Path, name: str, **join: Any) -> None:
    """Join, train, and write the state with what this rank knows of itself."""
    with rw.join(**join) as world:
        facts = {"local_rank": world.local_rank, "world_size": world.world_size, "source": world.source}
        torch.save({"state": train(world), **facts}, folder / f"{name}{world.rank}.pt")


def spawned(rank: int, folder: Path, ports: list[int]) -> None:
    """Join in each of torch's three ways, one after another."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0]), "RANK": str(rank), "WORLD_SIZE": "2"}
    train_in(folder, "env", init_method="env://")
    train_in(folder, "file", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    train_in(folder, "tcp", init_method=f"tcp://127.0.0.1:{ports[1]}", rank=rank, world_size=2)


def main() -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--spawn", action="store_true")
    parser.add_argument("--local_rank", "--local-rank", type=int)
    options = parser.parse_args()
    if options.spawn:
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            ports = [one.getsockname()[1], other.getsockname()[1]]
        torch.multiprocessing.spawn(spawned, args=(options.folder, ports), nprocs=2)
        return
    train_in(options.folder, "")


if __name__ == "__main__":
    main()
