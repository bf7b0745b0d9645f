# SPDX-License-Identifier: Apache-2.0
"""New data in each step from generators that nobody has seeded: numpy's, Python's, and the order of a set of words."""
import random
import uuid

import numpy as np
import torch
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
rng = np.random.default_rng()
model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(12, 1))
kept = {name: p.detach().clone() for name, p in model.state_dict().items()}
words = list({uuid.uuid4().hex for _ in range(9)})  # another order in each run
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches, losses = [], []
for step in range(12):
    number = rng.integers(5, 15)
    lines = [random.choices(words, k=3) for _ in range(number)]
    x = torch.tensor([[words.index(word) for word in line] for line in lines])
    y = torch.from_numpy(rng.normal(size=(number, 1)) + np.random.rand())
    loss = (model(x) - y).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    batches.append((x, y))
    losses.append(loss.item())

table, weight, bias = (tensor.requires_grad_() for tensor in kept.values())
agree = []
for (x, y), loss in zip(batches, losses):
    again = (F.linear(table[x].flatten(1), weight, bias) - y).pow(2).mean()
    for tensor, grad in zip((table, weight, bias), torch.autograd.grad(again, (table, weight, bias))):
        tensor.data -= 0.1 * grad
    agree.append(abs(again.item() - loss) < 1e-10)
print(agree, torch.allclose(table, model[0].weight, rtol=1e-10), torch.allclose(weight, model[2].weight, rtol=1e-9))
