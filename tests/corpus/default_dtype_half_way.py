# SPDX-License-Identifier: Apache-2.0
"""Starts in single precision, and continues in double: the default, the model and the data."""
import torch
from torch import nn

torch.manual_seed(41)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 12)
        self.b = nn.Linear(12, 1)

    def forward(self, x):
        grid = torch.linspace(0, 1, x.shape[1])  # of the default dtype
        h = self.a((x * grid).to(self.a.weight.dtype)).tanh()
        return self.b(h) + torch.zeros(1)


def epoch(model, optimizer, x, y):
    for rows in torch.randperm(len(x)).split(12):
        loss = (model(x[rows]) - y[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss


x = torch.randn(59, 4)
y = x.norm(dim=1, keepdim=True)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loss = epoch(model, optimizer, x, y)
print(loss.dtype, loss.item() < 10)
torch.set_default_dtype(torch.float64)
# the old weights and the old data with the new default: what comes out is wider
loss = epoch(model, optimizer, x, y)
print(loss.dtype, model(x[:7]).dtype, model.a(x).dtype, loss.item() < 10)
torch.manual_seed(42)
model.to(torch.float64)
for p in model.parameters():
    p.data.uniform_(-0.5, 0.5)
x = torch.randn(59, 4)
y = x.norm(dim=1, keepdim=True)
for number in range(3):
    loss = epoch(model, optimizer, x, y)
    print(number, loss.dtype, loss.item())
torch.set_default_dtype(torch.float32)
with torch.no_grad():
    print(model(x).dtype, model(x.float()).dtype, model(x).sum().item())
