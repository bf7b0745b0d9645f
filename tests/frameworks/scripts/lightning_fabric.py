# SPDX-License-Identifier: Apache-2.0
"""A loop of Lightning's Fabric. Arguments: a folder, and the number of devices."""

import os
import sys
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

folder = Path(sys.argv[1])
fabric = L.Fabric(accelerator="cpu", devices=int(sys.argv[2]))
fabric.launch()
fabric.seed_everything(1)

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = fabric.setup(model, optimizer)
data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))

model.train()
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()

metrics = {"loss": float(fabric.all_reduce(loss.detach(), reduce_op="mean"))}
fabric.save(folder / "checkpoint.ckpt", {"model": model, "optimizer": optimizer})
if fabric.is_global_zero:
    with (folder / "main").open("a") as file:
        file.write("rank 0\n")
facts = {"world_size": fabric.world_size, "variable": os.environ.get("WORLD_SIZE"), "metrics": metrics}
torch.save({**facts, "state": model.state_dict()}, folder / f"rank{fabric.global_rank}.pt")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()  # without it, Gloo aborts the interpreter now and then
