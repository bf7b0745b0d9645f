# SPDX-License-Identifier: Apache-2.0
"""A net gives the slope of a path, which a Runge-Kutta method follows: many calls before one backward."""

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(19)
STEP = 0.1


def follow(slope, state, steps):
    """Yield the state after each step of the classic method of fourth order."""
    moment = torch.tensor(0.0)
    for _ in range(steps):
        total, there = 0.0, torch.zeros_like(state)
        for ahead, weight in ((0.0, 1), (0.5, 2), (0.5, 2), (1.0, 1)):
            there = slope(moment + ahead * STEP, state + ahead * STEP * there)
            total = total + weight * there
        state, moment = state + STEP / 6 * total, moment + STEP
        yield state


class Pendulum(nn.Module):
    """Has no parameters: the truth."""

    def forward(self, moment, state):
        angle, speed = state.unbind(1)
        return torch.stack([speed, -2 * angle.sin() - 0.2 * speed], dim=1)


class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 2))
        self.fading = nn.Parameter(torch.tensor(0.0))

    def forward(self, moment, state):
        return self.layers(state) * (self.fading * moment).exp()


begin = torch.tensor([[1.5, 0.0]])
path = torch.cat([begin, *follow(Pendulum(), begin, 30)])
slope = Slope()
optimizer = torch.optim.RMSprop(slope.parameters(), lr=1e-2)
for step in range(7):
    places = torch.randperm(len(path) - 3)[:9]
    pieces = path[places + torch.arange(4).unsqueeze(1)]
    loss = (torch.stack(list(follow(slope, pieces[0], 3))) - pieces[1:]).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        with torch.no_grad():
            apart = torch.cat(list(follow(slope, begin, 30))) - path[1:]
        print("step", step, "pieces", repr(loss.item()), "whole path", repr(apart.abs().mean().item()))
