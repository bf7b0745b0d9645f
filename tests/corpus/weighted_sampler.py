# SPDX-License-Identifier: Apache-2.0
"""Rare wines are drawn as often as the others, by a WeightedRandomSampler."""

import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

torch.set_default_dtype(torch.float64)
torch.manual_seed(55)
wines, kinds = map(torch.tensor, load_wine(return_X_y=True))
wines, kinds = (torch.cat([part[:130], part[130::5]]) for part in (wines, kinds))
wines = (wines - wines.mean(0)) / wines.std(0)
number = kinds.bincount()
sampler = WeightedRandomSampler(number.max() / number[kinds], len(kinds))
loader = DataLoader(TensorDataset(wines, kinds), batch_size=21, sampler=sampler)
net = nn.Sequential(nn.Linear(13, 12), nn.ELU(), nn.Linear(12, 3))
optimizer = torch.optim.RMSprop(net.parameters(), lr=0.002)
print("wines of each kind", number.tolist())
for epoch in range(3):
    drawn, losses = [], []
    for wine, kind in loader:
        loss = nn.functional.cross_entropy(net(wine), kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        drawn += kind.tolist()
        losses.append(loss.item())
    print("epoch", epoch, "drawn", [drawn.count(kind) for kind in range(3)], "loss", repr(sum(losses)))
