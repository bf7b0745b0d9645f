# SPDX-License-Identifier: Apache-2.0
"""Forward moves a slow copy of the net and overwrites the oldest answers of a ring: parameters and buffers change."""

import copy

import torch
from torch import nn
from torch.nn.functional import normalize

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Recogniser(nn.Module):
    """Has to tell which answer of the slow net is about the same point, beside answers about earlier points."""

    def __init__(self, remembered=24):
        super().__init__()
        self.quick = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
        self.slow = copy.deepcopy(self.quick).requires_grad_(False)
        self.register_buffer("earlier", normalize(torch.randn(remembered, 6), dim=1))
        self.register_buffer("oldest", torch.tensor(0))

    def forward(self, points):
        mine = normalize(self.quick(points + 0.1 * torch.randn_like(points)), dim=1)
        with torch.no_grad():
            for weight, target in zip(self.slow.parameters(), self.quick.parameters()):
                weight.lerp_(target, 0.1)
            order, answers = torch.randperm(len(points)), torch.empty_like(mine)
            answers[order] = normalize(self.slow(points[order] + 0.1 * torch.randn_like(points)), dim=1)
        # Backward needs the answers as they are now.
        scores = torch.cat([(mine * answers).sum(1, keepdim=True), mine @ self.earlier.T.clone()], dim=1)
        places = (self.oldest + torch.arange(len(points))) % len(self.earlier)
        self.earlier[places] = answers
        self.oldest.add_(len(points)).remainder_(len(self.earlier))
        return scores / 0.2


recogniser = Recogniser()
optimizer = torch.optim.SGD(recogniser.parameters(), lr=0.05, momentum=0.9)
points = torch.randn(36, 8)
for epoch in range(2):
    for part in points[torch.randperm(36)].split(8):
        scores = recogniser(part)
        loss = -scores.log_softmax(1)[:, 0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first = int((scores.argmax(1) == 0).sum())
        print(epoch, repr(loss.item()), "recognised", first, "oldest", int(recogniser.oldest))
