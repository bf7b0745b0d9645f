# SPDX-License-Identifier: Apache-2.0
"""A net between whose halves each vector is replaced by a typical one; training calls change these, in buffers."""

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(28)


class Shelf(nn.Module):
    """Holds a few typical vectors, each a slow mean of the vectors that it stood for."""

    def __init__(self, places, size):
        super().__init__()
        self.register_buffer("sums", 0.3 * torch.randn(places, size))
        self.register_buffer("uses", torch.ones(places))

    def forward(self, vectors):
        typical = self.sums / self.uses.clamp(min=0.05)[:, None]
        place = (vectors[:, None] - typical).square().sum(2).argmin(1)
        if self.training:
            new_sums = torch.zeros_like(self.sums).index_add(0, place, vectors.detach())
            self.sums.lerp_(new_sums, 0.1)
            self.uses.lerp_(place.bincount(minlength=len(self.uses)).double(), 0.1)
        # The difference is zero, but lets gradients pass the choice, which has none.
        return typical[place] + (vectors - vectors.detach()), (vectors - typical[place]).square().mean(), place


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 3))
        self.shelf = Shelf(6, 3)
        self.second = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 9))

    def forward(self, rows):
        vectors, distance, place = self.shelf(self.first(rows))
        return self.second(vectors), distance, place


halves = Halves()
optimizer = torch.optim.Adam(halves.parameters(), lr=5e-3)
rows = 2 * torch.randn(4, 9).repeat(13, 1)[:50] + 0.2 * torch.randn(50, 9)
for epoch in range(3):
    for part in rows[torch.randperm(50)].split(11):
        made, distance, place = halves(part)
        error = (made - part).square().mean()
        optimizer.zero_grad()
        (error + 0.3 * distance).backward()
        optimizer.step()
    print("epoch", epoch, "error", repr(error.item()), "places in use", place.unique().tolist())
torch.save(halves.state_dict(), "shelf.pt")
