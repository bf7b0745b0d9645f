# SPDX-License-Identifier: Apache-2.0
"""Points of a class are drawn to its middle; the middles are learnt too, by an optimizer of their own."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
SHARE = 0.1


class Pull(nn.Module):
    """How far points are from the middles of their classes."""

    def __init__(self, kinds, size):
        super().__init__()
        self.middles = nn.Parameter(torch.randn(kinds, size))

    def forward(self, points, kinds):
        return (points - self.middles[kinds]).square().sum(1).mean()


class Mapper(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_plane = nn.Sequential(nn.Linear(8, 16), nn.PReLU(), nn.Linear(16, 2))
        self.to_kind = nn.Linear(2, 4)

    def forward(self, rows):
        points = self.to_plane(rows)
        return points, self.to_kind(nn.functional.leaky_relu(points))


kinds = torch.arange(58) % 4
rows = torch.randn(4, 8)[kinds] + 0.5 * torch.randn(58, 8)
mapper, pull = Mapper(), Pull(4, 2)
of_mapper = torch.optim.SGD(mapper.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
of_middles = torch.optim.SGD(pull.parameters(), lr=0.5)
for epoch in range(3):
    for which in torch.randperm(58).split(12):
        points, scores = mapper(rows[which])
        wrong = nn.functional.cross_entropy(scores, kinds[which])
        apart = pull(points, kinds[which])
        for optimizer in (of_mapper, of_middles):
            optimizer.zero_grad()
        (wrong + SHARE * apart).backward()
        pull.middles.grad /= SHARE  # the middles move at a pace that does not depend on the share
        for optimizer in (of_mapper, of_middles):
            optimizer.step()
    print(f"epoch {epoch}: wrong by {wrong.item():.12g}, apart by {apart.item():.12g}")
    print("  middles", [[round(value, 9) for value in middle] for middle in pull.middles.tolist()])
