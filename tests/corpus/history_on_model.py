# SPDX-License-Identifier: Apache-2.0
"""The model keeps a list of what it has seen and a running count; the training reads them."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(63)


class Meter:
    def __init__(self):
        self.count = 0
        self.sizes = []

    def add(self, n):
        self.count += n
        self.sizes.append(n)


class Net(nn.Module):
    seen_by_class = 0

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 1))
        self.batches = []
        self.meter = Meter()

    def forward(self, x):
        self.batches.append(tuple(x.shape))
        self.meter.add(x.shape[0])
        Net.seen_by_class += len(x)
        return self.net(x)


net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.05)
data = torch.randn(43, 4)
for epoch in range(2):
    for x in data[torch.randperm(43)].split(9):
        loss = (net(x) - x.norm(dim=1, keepdim=True)).pow(2).sum() / 9
        opt.zero_grad()
        loss.backward()
        opt.step()
        if net.meter.count >= 60:
            for g in opt.param_groups:
                g["lr"] = 0.01
    print(epoch, loss.item(), net.meter.count, net.meter.sizes, Net.seen_by_class, net.batches[-2:], opt.param_groups[0]["lr"])
