# SPDX-License-Identifier: Apache-2.0
"""The model rescales a batch with an outlier: a branch that most batches never take."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(60)


class Robust(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 9), nn.Linear(9, 1)

    def forward(self, x):
        largest = x.abs().max()
        if largest > 8:
            x = x * (8 / largest)
        return self.b(torch.relu(self.a(x)))


model = Robust()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(7):
    x = torch.randn(14, 3)
    if step in (2, 5):
        x[0] *= 20
    loss = (model(x) - x.sum(1, keepdim=True)).abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
