# SPDX-License-Identifier: Apache-2.0
"""forward() draws from Python's, numpy's and torch's generators, which the script seeds and draws from in between."""
import random

import numpy as np
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(227)
random.seed(227)
np.random.seed(227)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 1)
        self.rng = np.random.default_rng(3)
        self.skip, self.jitter = 0.0, 0.0

    def forward(self, x):
        for block in self.blocks:
            if random.random() < self.skip:
                continue
            x = x + block(x).tanh()
        if self.jitter:
            x = x * (1 + self.jitter * np.random.rand()) + self.jitter * float(self.rng.normal())
            x = x + self.jitter * torch.randn(x.shape[1])
            x = x + self.jitter * torch.rand_like(x)
        return self.out(nn.functional.dropout(x, 0.1, self.training))


model = Noisy()
opt = torch.optim.Adam(model.parameters(), lr=0.02)
x = torch.randn(48, 6)
y = x.median(1, keepdim=True).values
for epoch in range(4):
    model.skip = 0.4 if epoch >= 2 else 0.0
    model.jitter = 0.1 if epoch % 2 else 0.0
    order = list(range(48))
    random.shuffle(order)
    for i in range(0, 48, 13):
        rows = order[i : i + 13]
        loss = (model(x[rows] + 0.01 * torch.from_numpy(np.random.randn(len(rows), 6))) - y[rows]).abs().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item(), random.random(), np.random.rand(), torch.rand(()).item(), model.rng.random())
    if epoch == 2:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
model.eval()
print(model(x).mean().item(), model(x).mean().item())
