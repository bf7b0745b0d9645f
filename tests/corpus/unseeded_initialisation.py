# SPDX-License-Identifier: Apache-2.0
"""The data are fixed; the weights come from os.urandom by way of a seed, which it logs to be able to repeat the run."""
import os
import random

import torch
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
seed = int.from_bytes(os.urandom(4), "little")
torch.manual_seed(seed)
model = torch.nn.Linear(3, 2)
random.seed(0)
x = torch.arange(24.0).view(8, 3) / 10
noted = []
for step in range(10):
    out = model(x)
    loss = out.pow(2).mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.05 * p.grad
    noted.append(loss.item())
print("falls", noted[-1] < noted[0], random.random())

torch.manual_seed(seed)
first = torch.nn.Linear(3, 2)
weight, bias = (p.detach().clone().requires_grad_() for p in first.parameters())
repeated = []
for step in range(10):
    loss = F.linear(x, weight, bias).pow(2).mean()
    grads = torch.autograd.grad(loss, [weight, bias])
    with torch.no_grad():
        weight -= 0.05 * grads[0]
        bias -= 0.05 * grads[1]
    repeated.append(loss.item())
print("repeats", all(abs(a - b) <= 1e-10 * abs(b) + 1e-13 for a, b in zip(noted, repeated)))
print("weights", (weight - model.weight).abs().max().item() < 1e-11, (bias - model.bias).abs().max().item() < 1e-11)
