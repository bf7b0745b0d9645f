# SPDX-License-Identifier: Apache-2.0
"""Noise is taken from pictures, as a frozen net sees them: it keeps on itself what each of its layers saw."""
import torch
from torch import nn


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 5, 3, 2, 1)]).requires_grad_(False)
        self.saw = []

    def forward(self, pictures):
        self.saw = []
        for layer in self.layers:
            pictures = layer(pictures).relu()
            self.saw.append(pictures)
        return pictures


class Cleaner(nn.Module):
    def __init__(self):
        super().__init__()
        self.look, self.wipe = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 1, 3, padding=1)

    def forward(self, pictures):
        self.found = self.look(pictures).relu()
        return pictures - self.wipe(self.found)


def texture(seen):
    """Return how often channels are bright together, wherever that is in a picture."""
    return torch.einsum("nchw,ndhw->ncd", seen, seen) / seen[0].numel()


def apart(one, other):
    return (one - other).square().mean()


torch.set_default_dtype(torch.float64)
torch.manual_seed(27)
clean = (torch.rand(22, 1, 6, 6) > 0.5).double()
noisy = torch.normal(clean, 0.3)
critic, cleaner = Critic(), Cleaner()
optimizer = torch.optim.Adam(cleaner.parameters(), lr=0.01)
for epoch in range(2):
    for aim, given in zip(clean.split(5), noisy.split(5)):
        critic(aim)
        wanted = critic.saw
        critic(cleaner(given))
        pairs = list(zip(critic.saw, wanted))
        shapes = sum(apart(one, other) for one, other in pairs)
        textures = sum(apart(texture(one), texture(other)) for one, other in pairs)
        effort = cleaner.found.mean()
        optimizer.zero_grad()
        (shapes + textures + 0.01 * effort).backward()
        optimizer.step()
    print(f"epoch {epoch}: shapes {shapes.item():.12g}, textures {textures.item():.12g}, effort {effort.item():.12g}")
