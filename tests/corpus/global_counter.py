# SPDX-License-Identifier: Apache-2.0
"""Gumbel-softmax whose temperature falls with a global step that forward() itself counts; statistics in a global dict."""
import math
from collections import defaultdict

import torch
from torch import nn
from torch.nn import functional as F

STEP = 0
STATS = defaultdict(list)


class Selector(nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = nn.Linear(6, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        global STEP
        STEP += 1
        tau = max(0.3, math.exp(-0.1 * STEP))
        STATS["tau"].append(tau)
        gate = F.softmax(self.logits(x) / tau, dim=-1)
        return self.out(x * gate)


torch.set_default_dtype(torch.float64)
torch.manual_seed(80)
model = Selector()
opt = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(6):
    x = torch.randn(15, 6)
    loss = F.mse_loss(model(x), x[:, :1])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(STEP, loss.item())
print(len(STATS["tau"]), STATS["tau"][-1])
