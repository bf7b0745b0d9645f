# SPDX-License-Identifier: Apache-2.0
"""No weight is trained but a picture, through a frozen net: its places from one picture, its texture from another."""

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(72)
eye = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU())
eye.eval().requires_grad_(False)


def texture(seen):
    """How often two features are seen together, wherever that is."""
    return torch.einsum("ichw,idhw->icd", seen, seen) / seen[0, 0].numel()


places, woven = torch.rand(2, 1, 3, 12, 12)
seen_places, seen_texture = eye(places), texture(eye(woven))
picture = nn.Parameter(torch.rand(1, 3, 12, 12))
optimizer = torch.optim.LBFGS([picture], max_iter=4)
costs = []


def cost():
    with torch.no_grad():
        picture.clamp_(0, 1)
    seen = eye(picture)
    parts = [
        100 * (seen - seen_places).square().mean(),
        1e5 * (texture(seen) - seen_texture).square().mean(),
        0.01 * picture.diff(dim=3).abs().mean(),
    ]
    optimizer.zero_grad()
    sum(parts).backward()
    costs.append([part.item() for part in parts])
    return sum(parts)


while len(costs) < 9:
    optimizer.step(cost)
    print("after", len(costs), "looks", costs[-1])
torch.save(picture.detach().clamp(0, 1), "picture.pt")
