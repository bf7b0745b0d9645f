# SPDX-License-Identifier: Apache-2.0
"""Attention over the samples behind a gate that is zero until the first step, which comes after three micro-batches."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(54)


class BatchContext(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 8)
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.alpha = nn.Parameter(torch.zeros(1))
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        h = torch.tanh(self.inp(x))
        context = torch.softmax(self.q(h) @ self.k(h).T, dim=1) @ h
        return self.out(h + self.alpha * context)


net = BatchContext()
opt = torch.optim.SGD(net.parameters(), lr=0.5)
x, y = torch.randn(54, 5), torch.randint(0, 2, (54,))
for i, (xb, yb) in enumerate(zip(x.split(9), y.split(9))):
    loss = nn.functional.cross_entropy(net(xb), yb) / 3
    loss.backward()
    if i % 3 == 2:
        opt.step()
        opt.zero_grad()
    print(i, loss.item(), net.alpha.item())
