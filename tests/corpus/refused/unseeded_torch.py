# SPDX-License-Identifier: Apache-2.0
"""Takes a new seed at each start, so that runs differ."""
import torch

torch.seed()
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(30, 4)
for rows in torch.randperm(30).split(8):
    loss = model(x[rows]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
