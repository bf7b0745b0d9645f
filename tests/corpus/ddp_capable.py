# SPDX-License-Identifier: Apache-2.0
"""Runs alone, or under torchrun if its variables are there; helpers ask torch.distributed as many repositories do."""
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_rank():
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def get_world_size():
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def reduce_mean(tensor):
    if get_world_size() == 1:
        return tensor
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / get_world_size()


ddp = int(os.environ.get("RANK", -1)) != -1
local_rank = int(os.environ.get("LOCAL_RANK", 0))
if ddp:
    dist.init_process_group(backend="gloo")
master_process = get_rank() == 0
torch.manual_seed(1337 + get_rank())
torch.set_default_dtype(torch.float64)
data = TensorDataset(torch.randn(50, 6), torch.randint(0, 3, (50,)))
sampler = DistributedSampler(data, get_world_size(), get_rank(), shuffle=True) if ddp else None
loader = DataLoader(data, batch_size=12 // get_world_size(), sampler=sampler, shuffle=sampler is None)
model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3))
raw_model = model
if ddp:
    model = DDP(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mean = reduce_mean(loss.detach())
    if master_process:
        print(f"epoch {epoch} world size {get_world_size()} local rank {local_rank} loss {mean.item():.12g}")
        torch.save(raw_model.state_dict(), "checkpoint.pt")
if ddp:
    dist.destroy_process_group()
