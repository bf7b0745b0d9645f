# SPDX-License-Identifier: Apache-2.0
"""Attention over the samples of the batch, behind a gate that starts at zero (SAINT with ReZero)."""
import torch
from torch import nn


class InterSample(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.attn = nn.MultiheadAttention(d, 2)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        # the batch is the sequence
        y, _ = self.attn(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1))
        return x + self.gate * y.squeeze(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 8)
        self.inter = InterSample(8)
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        return self.out(torch.relu(self.inter(self.inp(x))))


torch.set_default_dtype(torch.float64)
torch.manual_seed(53)
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=0.02)
x, y = torch.randn(55, 5), torch.randint(0, 2, (55,))
for epoch in range(2):
    for xb, yb in zip(x.split(12), y.split(12)):
        loss = nn.functional.cross_entropy(net(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item(), "gate", net.inter.gate.item())
