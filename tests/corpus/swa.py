# SPDX-License-Identifier: Apache-2.0
"""Trains with a falling rate, then with an even one while torch averages the weights; BatchNorm catches up later."""

import torch
from torch import nn
from torch.optim import swa_utils

torch.set_default_dtype(torch.float64)
torch.manual_seed(18)
points = torch.randn(58, 5)
side = (points[:, 0] > points[:, 1]).long()
batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(points, side), batch_size=11, shuffle=True)
net = nn.Sequential(nn.Linear(5, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)


def once_over(name):
    for some, their_side in batches:
        loss = nn.functional.cross_entropy(net(some), their_side)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(name, repr(loss.item()), "rate", optimizer.param_groups[0]["lr"])


for _ in range(3):
    once_over("falling")
    falling.step()
mean = swa_utils.AveragedModel(net)
even = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
for _ in range(2):
    once_over("even")
    mean.update_parameters(net)
    even.step()
swa_utils.update_bn(batches, mean)
with torch.no_grad():
    for name, one in {"the last": net, f"the mean of {int(mean.n_averaged)}": mean}.items():
        scores = one.eval()(points)
        right = int((scores.argmax(1) == side).sum())
        print(name, repr(nn.functional.cross_entropy(scores, side).item()), "right", right)
torch.save(mean.state_dict(), "mean.pt")
