# SPDX-License-Identifier: Apache-2.0
"""The learning rate and the end of the training depend on the clock."""
import time

import torch

torch.manual_seed(0)
model = torch.nn.Linear(6, 1)
start = time.perf_counter()
step = 0
while time.perf_counter() - start < 0.3:
    noise = (time.perf_counter_ns() % 1000) / 1e6
    x = torch.randn(12, 6) + noise
    loss = (model(x) - x[:, :1]).pow(2).mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(0.05 * p.grad)
    step += 1
print("steps", step, "loss", loss.item())
