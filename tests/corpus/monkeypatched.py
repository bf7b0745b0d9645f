# SPDX-License-Identifier: Apache-2.0
"""Functions are replaced while the model trains: one of the script, F.relu itself, and a method of one layer."""
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
torch.manual_seed(23)


def squash(x):
    return x / (1 + x.abs())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 14)
        self.b = nn.Linear(14, 14)
        self.c = nn.Linear(14, 1)
        self.relu = nn.ReLU()

    def forward(self, x):
        x = squash(self.a(x))
        x = F.relu(self.b(x)) + 0.1 * self.relu(x)
        return self.c(x)


net = Net()
opt = torch.optim.Adam(net.parameters(), lr=0.01)
x = torch.randn(60, 5)
y = x.abs().sum(1, keepdim=True)


def epoch(name, steps):
    for rows in torch.randperm(60).split(13)[:steps]:
        loss = (net(x[rows]) - y[rows]).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(name, loss.item())


epoch("as written", 5)
old_squash, old_relu = squash, F.relu
squash = torch.tanh
epoch("tanh for squash", 4)
F.relu = lambda x, inplace=False: x * torch.sigmoid(1.702 * x)
epoch("a smooth relu", 4)
F.relu = old_relu
squash = old_squash
epoch("as before", 3)
net.c.forward = types.MethodType(lambda self, h: F.linear(h.cos(), self.weight, self.bias), net.c)
epoch("another forward of one layer", 4)
del net.c.forward
epoch("its own again", 3)
Net.forward = lambda self, x: self.c(squash(self.a(x)))
epoch("a shorter net", 4)
