# SPDX-License-Identifier: Apache-2.0
"""Points on two spots are blurred step by step; a net learns to say what was added, and so to make spots of noise."""
import copy

import torch
from torch import nn

STEPS = 10
torch.set_default_dtype(torch.float64)
torch.manual_seed(123)
added = torch.linspace(1e-3, 0.2, STEPS)
left = (1 - added).cumprod(0)


class NoiseFinder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.register_buffer("speeds", 2.0 ** -torch.arange(4))
        self.of_step = nn.Linear(8, width)
        self.of_point = nn.Linear(2, width)
        self.tail = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, points, step):
        angles = step.unsqueeze(1) * self.speeds
        clock = torch.cat([angles.cos(), angles.sin()], 1)
        return self.tail(self.of_point(points) + self.of_step(clock))


def blurred(points, noise, step):
    share = left[step, None]
    return share.sqrt() * points + (1 - share).sqrt() * noise


def drawn(finder, number):
    """Start with noise alone, and take away a little of it in each step."""
    points = torch.randn(number, 2)
    for step in range(STEPS - 1, -1, -1):
        with torch.no_grad():
            noise = finder(points, torch.tensor(step).repeat(number))
        points = points - added[step] / (1 - left[step]).sqrt() * noise
        points = points / (1 - added[step]).sqrt()
        if step:
            points = torch.normal(points, added[step].sqrt())
    return points


spots = torch.normal(torch.tensor([[0.0, 0.0], [1.0, -1.0]]).repeat(45, 1), 0.1)
finder = NoiseFinder()
smooth = copy.deepcopy(finder).requires_grad_(False)
optimizer = torch.optim.AdamW(finder.parameters(), lr=4e-3)
for epoch in range(3):
    missed = []
    for points in torch.utils.data.DataLoader(spots, batch_size=20, shuffle=True):
        step, noise = torch.randint(STEPS, (len(points),)), torch.randn_like(points)
        loss = (finder(blurred(points, noise, step), step) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(finder.parameters(), 1.0)
        optimizer.step()
        for slow, weight in zip(smooth.parameters(), finder.parameters()):
            slow.lerp_(weight, 0.1)
        missed.append(loss.item())
    print("epoch", epoch, "batches", len(missed), "missed by", sum(missed) / len(missed))
for number, point in enumerate(drawn(smooth, 7).tolist()):
    print("point", number, *[round(value, 9) for value in point])
