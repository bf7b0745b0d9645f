# SPDX-License-Identifier: Apache-2.0
"""Takes a new seed at each start, so that runs differ; the same seed gives the same run again."""
import torch
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
seed = torch.seed()
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(30, 4)
losses = []
for rows in torch.cat([torch.randperm(30) for _ in range(3)]).split(8):
    loss = (model(x[rows]) - x[rows].prod(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
last = torch.rand(())

torch.manual_seed(seed)
one, two = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
weights = [p.detach().clone().requires_grad_() for p in (one.weight, one.bias, two.weight, two.bias)]
optimizer = torch.optim.Adam(weights)
print("same data", torch.equal(torch.randn(30, 4), x))
agree = 0
for loss, rows in zip(losses, torch.cat([torch.randperm(30) for _ in range(3)]).split(8)):
    h = F.dropout(F.linear(x[rows], weights[0], weights[1]).relu(), 0.3)
    again = (F.linear(h, weights[2], weights[3]) - x[rows].prod(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    again.backward()
    optimizer.step()
    agree += abs(again.item() - loss) < 1e-9
print(agree, "of", len(losses), "losses agree; the generator", torch.equal(torch.rand(()), last))
