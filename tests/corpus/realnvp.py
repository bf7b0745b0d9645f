# SPDX-License-Identifier: Apache-2.0
"""A flow between a normal distribution and a curve: the loss and the samples come from methods other than forward."""

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(30)


class Bend(nn.Module):
    """The two coordinates of a point take turns: one stays, and tells how far the other is stretched and moved."""

    def __init__(self, turns):
        super().__init__()
        self.tell = nn.ModuleList(nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 2)) for _ in range(turns))
        self.middle = nn.Parameter(torch.zeros(2), requires_grad=False)

    def round(self):
        return torch.distributions.MultivariateNormal(self.middle, torch.eye(2))

    def surprise(self, points):
        sides, growth = list(points.split(1, dim=1)), torch.zeros(len(points))
        for turn, tell in enumerate(self.tell):
            stretch, move = tell(sides[turn % 2]).split(1, dim=1)
            sides[1 - turn % 2] = stretch.tanh().exp() * (sides[1 - turn % 2] + move)
            growth += stretch.tanh()[:, 0]
        return -growth - self.round().log_prob(torch.cat(sides, dim=1))

    def invent(self, number):
        sides = list(self.round().sample((number,)).split(1, dim=1))
        for turn in range(len(self.tell) - 1, -1, -1):
            stretch, move = self.tell[turn](sides[turn % 2]).split(1, dim=1)
            sides[1 - turn % 2] = sides[1 - turn % 2] / stretch.tanh().exp() - move
        return torch.cat(sides, dim=1)


bend = Bend(4)
optimizer = torch.optim.Adam([weight for weight in bend.parameters() if weight.requires_grad], lr=5e-3)
for step in range(9):
    along = 2 * torch.rand(29) - 1
    curve = torch.stack([along, along.square()], dim=1) + 0.1 * torch.randn(29, 2)
    loss = bend.surprise(curve).mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
    if step % 4 == 0:
        print("step", step, "surprise", repr(loss.item()))
bend.eval()
with torch.no_grad():
    invented = bend.invent(50)
    print("invented around", invented.mean(0).tolist(), "surprise", bend.surprise(invented).mean().item())
