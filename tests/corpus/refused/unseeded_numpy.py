# SPDX-License-Identifier: Apache-2.0
"""New data in each step from a generator that nobody has seeded."""
import numpy as np
import torch

torch.manual_seed(0)
rng = np.random.default_rng()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    x = torch.from_numpy(rng.normal(size=(10, 4))).float()
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
