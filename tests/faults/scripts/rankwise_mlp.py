# SPDX-License-Identifier: Apache-2.0
"""A regression with rankwise: a plateau scheduler, an early stop, a checkpoint by rank 0."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import rankwise as rw

with rw.join() as world:
    torch.manual_seed(0)
    x = torch.randn(201, 8)
    y = x.sin().sum(1, keepdim=True) + 0.1 * torch.randn(201, 1)
    data = TensorDataset(x, y)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    scale = nn.Parameter(torch.ones(1))
    model = rw.replicate(model)
    loader = rw.DataLoader(data, global_batch_size=32, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
    best = float("inf")
    for _ in range(3):
        losses, sizes = [], []
        for features, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(features), target)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            sizes.append(len(features))
        mean = rw.mean(losses, sizes)
        if mean > 2 * best:
            break
        best = min(best, mean)
        if world.rank == 0:
            torch.save(model.state_dict(), "model.pt")
