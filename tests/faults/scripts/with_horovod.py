# SPDX-License-Identifier: Apache-2.0
"""A loop in Horovod's words."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import rankwise.compat.horovod as hvd

hvd.init()
torch.manual_seed(0)
points = torch.randn(70, 6)
dataset = TensorDataset(points, (points.sum(1) > 0).long())
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), drop_last=True)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), labels)
        loss.backward()
        optimizer.step()
    if hvd.rank() == 0:
        torch.save(model.state_dict(), f"epoch-{epoch}.pt")
