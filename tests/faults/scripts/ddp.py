# SPDX-License-Identifier: Apache-2.0
"""A classification with DistributedDataParallel, as torch's tutorials write it."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Points(Dataset):
    def __init__(self, length):
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(length, 8, generator=generator)
        self.y = (self.x[:, 0] * self.x[:, 1] > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        point = self.x[index]
        return point, self.y[index]


dist.init_process_group("gloo")
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))
model = DistributedDataParallel(model)
torch.manual_seed(rank + 1)
dataset = Points(96)
sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
for epoch in range(3):
    sampler.set_epoch(epoch)
    total = torch.zeros(1)
    for points, labels in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(points), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    scheduler.step(total.item())
    if rank == 0:
        torch.save(model.module.state_dict(), f"epoch-{epoch}.pt")
dist.destroy_process_group()
