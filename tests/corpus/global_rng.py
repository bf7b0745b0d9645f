# SPDX-License-Identifier: Apache-2.0
"""Stochastic depth by a coin from a NumPy generator of the file, shared with the data."""
import numpy as np
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
rng = np.random.default_rng(1234)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(3, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        h = torch.tanh(self.inp(x))
        for block in self.blocks:
            if not self.training or rng.random() < 0.8:
                h = h + torch.tanh(block(h))
        return self.out(h)


net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for step in range(7):
    x = torch.from_numpy(rng.normal(size=(11, 3)))
    loss = (net(x) - x.prod(1, keepdim=True)).abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
net.eval()
print(net(torch.ones(4, 3)).sum().item(), rng.random())
