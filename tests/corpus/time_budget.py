# SPDX-License-Identifier: Apache-2.0
"""The noise and the end of the training depend on the clock; what it notes lets it compute all again in the end."""
import time

import torch
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(9, 1))
first = [p.detach().clone() for p in model.parameters()]
chance = torch.get_rng_state()
start = time.perf_counter()
notes, losses = [], []
while len(losses) < 20 or time.perf_counter() - start < 0.3:
    noise = (time.perf_counter_ns() % 1000) / 1e6
    x = torch.randn(12, 6) + noise
    loss = (model(x) - x[:, :1]).pow(2).mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(0.05 * p.grad)
    notes.append(noise)
    losses.append(loss.item())
print("in time", time.perf_counter() - start < 60, "more than 19 steps", len(losses) > 19)

torch.set_rng_state(chance)
weights = [w.requires_grad_() for w in first]
apart = 0.0
for noise, loss in zip(notes, losses):
    x = torch.randn(12, 6) + noise
    h = F.dropout(F.linear(x, weights[0], weights[1]), 0.1).tanh()
    again = (F.linear(h, weights[2], weights[3]) - x[:, :1]).pow(2).mean()
    for w, g in zip(weights, torch.autograd.grad(again, weights)):
        w.data.sub_(0.05 * g)
    apart = max(apart, abs(again.item() - loss) / loss)
print("computed again, all losses agree:", apart < 1e-9)
print("and all weights:", all(torch.allclose(w, p, rtol=1e-9) for w, p in zip(weights, model.parameters())))
