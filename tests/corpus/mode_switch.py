# SPDX-License-Identifier: Apache-2.0
"""Warm-up without, then with statistics of the batch: a flag that the training sets."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(5)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(5, 12)
        self.fc2 = nn.Linear(12, 4)
        self.centre = False
        self.scale = 1.0

    def forward(self, x):
        z = self.fc2(torch.relu(self.fc1(x)))
        if self.centre:
            z = z - z.mean(0, keepdim=True)
        return z * self.scale


head = Head()
opt = torch.optim.Adam(head.parameters(), lr=0.01)
x = torch.randn(48, 5)
for epoch in range(4):
    head.centre = epoch == 2
    head.scale = 1.0 + 0.5 * epoch
    for xb in x.split(16):
        z = head(xb)
        loss = (z - xb[:, :4].sign()).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, head.centre, loss.item())
