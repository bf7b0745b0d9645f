# SPDX-License-Identifier: Apache-2.0
"""Evaluates in the middle of an epoch; sets modes of parts, and of nothing but a flag, without care for the rest."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(73)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(4 * 8, 2)

    def forward(self, x):
        h = self.drop(self.norm(self.conv(x)).relu())
        if not self.training:
            h = h.round(decimals=2)
        return self.out(h.flatten(1))


net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.05)
x = torch.randn(63, 1, 8)
y = (x.diff(dim=2).abs().mean((1, 2)) > 1.1).long()
best = 9.0
for epoch in range(2):
    net.train()
    for i, rows in enumerate(torch.randperm(54).split(8)):
        loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i % 3 == 2:
            net.eval()
            with torch.no_grad():
                valid = nn.functional.cross_entropy(net(x[54:]), y[54:]).item()
            best = min(best, valid)
            print(epoch, i, "train", loss.item(), "valid", valid, "mean", net.norm.running_mean.sum().item())
            if i == 5:
                net.norm.train()  # forgets the other parts until the next epoch
            else:
                net.train()
    net.drop.p = 0.1
    net.norm.momentum = None if epoch else 0.3
net.train()
net.norm.eval()
print("frozen statistics", nn.functional.cross_entropy(net(x), y).item(), net.norm.num_batches_tracked.item())
net.training = False
print("its own flag", nn.functional.cross_entropy(net(x), y).item())
net.norm.track_running_stats = False
net.norm.running_mean = net.norm.running_var = None
print("no statistics", nn.functional.cross_entropy(net(x), y).item(), best)
