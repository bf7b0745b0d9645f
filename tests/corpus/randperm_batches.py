# SPDX-License-Identifier: Apache-2.0
"""Batches are cut from a shuffled list of rows, and the model's forward is called by its name."""

import torch

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
points = torch.randn(71, 7)
wanted = torch.stack([points[:, 0].sin(), points[:, 1] * points[:, 2]], dim=1)
model = torch.nn.Sequential(torch.nn.Linear(7, 19), torch.nn.ReLU(), torch.nn.Linear(19, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(4):
    left, total = torch.randperm(71), 0.0
    while len(left) > 0:
        now, left = left[:16], left[16:]
        error = (model.forward(points[now]) - wanted[now]).square()
        optimizer.zero_grad()
        error.mean().backward()
        optimizer.step()
        total += error.sum().item()
    print("epoch", epoch, "error", repr(total / 71))
