# SPDX-License-Identifier: Apache-2.0
"""A script for torchrun, or for one process as torchrun would start it."""
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29531")
dist.init_process_group("gloo", rank=int(os.environ.get("RANK", 0)), world_size=int(os.environ.get("WORLD_SIZE", 1)))
torch.manual_seed(0)
model = DDP(torch.nn.Linear(3, 1))
for _ in range(2):
    loss = model(torch.randn(5, 3)).pow(2).mean()
    loss.backward()
print(loss.item())
dist.destroy_process_group()
