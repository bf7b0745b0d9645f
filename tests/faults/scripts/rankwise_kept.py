# SPDX-License-Identifier: Apache-2.0
"""Values that are kept from step to step: a queue of keys, targets of each sample, a center, a baseline, a log."""

import copy

import torch
from torch import nn
from torch.utils.data import TensorDataset

import rankwise as rw


class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.center = torch.zeros(4)

    def forward(self, x, key):
        loss = (nn.functional.log_softmax(x, 1) * (key - self.center).softmax(1)).sum(1).neg().mean()
        self.center = 0.9 * self.center + 0.1 * rw.whole_batch(key).mean(0)
        return loss


torch.manual_seed(0)
with rw.join() as world:
    model = rw.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
    slow = copy.deepcopy(model)
    data = TensorDataset(torch.randn(40, 6), torch.randn(40), torch.arange(40))
    loader = rw.DataLoader(data, global_batch_size=8, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    queue, targets, criterion = torch.randn(16, 4), torch.zeros(40, 4), Centered()
    baseline = total = 0.0
    for _ in range(3):
        for x, reward, index in loader:
            optimizer.zero_grad()
            out = model(x)
            with torch.no_grad():
                key = slow(x)
            contrast = nn.functional.cross_entropy(
                torch.cat([(out * key).sum(1, keepdim=True), out @ queue.T], 1), index * 0
            )
            early = (targets[index] * out.softmax(1)).sum(1).mean()
            policy = (out.log_softmax(1)[:, 0] * (reward - baseline)).mean()
            loss = contrast + early - policy + criterion(out, key)
            loss.backward()
            optimizer.step()
            queue = torch.cat([queue, rw.whole_batch(key)])[-16:]
            rows, soft = rw.whole_batch(index), rw.whole_batch(out.detach().softmax(1))
            targets[rows] = 0.7 * targets[rows] + 0.3 * soft
            baseline = 0.9 * baseline + 0.1 * rw.mean(reward.mean(), len(x))
            total += loss.item()
    print(total)
