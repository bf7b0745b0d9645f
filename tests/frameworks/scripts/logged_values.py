# SPDX-License-Identifier: Apache-2.0
"""Logs a value in each step, which ranks have different ones of."""

import torch

import rankwise as rw

world = rw.join()
model = rw.replicate(torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.randn(5, 3)).square().mean()
    rw.log_value("loss", torch.tensor(step + 10.0 * world.rank), weight=1.0 + world.rank)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
