# SPDX-License-Identifier: Apache-2.0
"""Each row is seen twice, with other noise: one net learns to guess what its slow copy makes of the other sight."""
import copy

import torch
from torch import nn


class TwoSights(nn.Module):
    def __init__(self):
        super().__init__()
        self.quick = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(),
            nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(),
            nn.Linear(12, 4),
        )
        self.guess = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.slow = copy.deepcopy(self.quick).requires_grad_(False)

    def forward(self, left, right):
        guesses = [self.guess(self.quick(sight)) for sight in (left, right)]
        with torch.no_grad():
            answers = [self.slow(sight) for sight in (right, left)]
        likeness = [nn.functional.cosine_similarity(*pair) for pair in zip(guesses, answers)]
        return (1 - torch.stack(likeness)).mean()

    def follow(self, share):
        for behind, ahead in zip(self.slow.parameters(), self.quick.parameters()):
            behind.data = behind.data + share * (ahead.data - behind.data)


torch.set_default_dtype(torch.float64)
torch.manual_seed(9)
sights = TwoSights()
optimizer = torch.optim.Adam([*sights.quick.parameters(), *sights.guess.parameters()], lr=3e-3)
rows = torch.randn(45, 8)
for epoch in range(3):
    missed = []
    for part in rows[torch.randperm(45)].split(10):
        loss = sights(torch.normal(part, 0.1), torch.normal(part, 0.1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sights.follow(0.1)
        missed.append(loss.item())
    print("epoch", epoch, "first and last batch:", missed[0], missed[-1])
torch.save(sights.slow.state_dict(), "slow.pt")
