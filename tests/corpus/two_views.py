# SPDX-License-Identifier: Apache-2.0
"""Two noisy views of each point must find each other among all points of the batch; then a line is fitted on top."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(14)
kinds = torch.arange(45) % 3
points = torch.randn(3, 10)[kinds] + 0.2 * torch.randn(45, 10)
body = nn.Sequential(nn.Linear(10, 24, bias=False), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 6))
head = nn.Sequential(nn.ReLU(), nn.Linear(6, 4))
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1, momentum=0.8)
batches = torch.utils.data.DataLoader(points, batch_size=14, shuffle=True)
for epoch in range(3):
    for seen in batches:
        left, right = (
            nn.functional.normalize(head(body(seen + 0.1 * torch.randn_like(seen))), dim=1) for _ in range(2)
        )
        alike = left @ right.T / 0.3
        itself = torch.arange(len(seen))
        loss = (nn.functional.cross_entropy(alike, itself) + nn.functional.cross_entropy(alike.T, itself)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(epoch, repr(loss.item()), "found", int((alike.argmax(1) == itself).sum()))
body.eval().requires_grad_(False)
line = nn.Linear(6, 3)
follow = torch.optim.Adam(line.parameters(), lr=0.05)
for _ in range(8):
    loss = nn.functional.cross_entropy(line(body(points)), kinds)
    follow.zero_grad()
    loss.backward()
    follow.step()
print("on top", repr(loss.item()))
