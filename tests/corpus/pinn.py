# SPDX-License-Identifier: Apache-2.0
"""A net learns how a string swings from the equation of waves alone: second derivatives in the loss, by autograd."""

import math

import numpy as np
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
np.random.seed(0)
torch.manual_seed(0)


class Height(nn.Module):
    def __init__(self, *widths):
        super().__init__()
        self.inner = nn.ModuleList(map(nn.Linear, (2, *widths), widths))
        self.outer = nn.Linear(widths[-1], 1)

    def forward(self, place, moment):
        state = torch.hstack([place, moment])
        for layer in self.inner:
            state = layer(state).tanh()
        return self.outer(state)


def slope(values, by):
    return torch.autograd.grad(values.sum(), by, create_graph=True)[0]


def anywhere(number, until=1.0):
    return torch.tensor(np.random.rand(number, 1) * until, requires_grad=True)


height = Height(14, 14)
optimizer = torch.optim.Adam(height.parameters(), lr=5e-3)
for step in range(10):
    place, moment = anywhere(33), anywhere(33, 0.5)
    inside = height(place, moment)
    wave = (slope(slope(inside, moment), moment) - slope(slope(inside, place), place)).square().mean()

    place = anywhere(21)
    begin = torch.zeros_like(place, requires_grad=True)
    plucked = height(place, begin)
    start = (plucked - (math.pi * place).sin()).square().mean() + slope(plucked, begin).square().mean()

    moment = anywhere(11, 0.5)
    ends = sum(height(torch.full_like(moment, end), moment).square().mean() for end in (0.0, 1.0))

    optimizer.zero_grad()
    (wave + 10 * start + 10 * ends).backward()
    optimizer.step()
    if step % 3 == 0:
        print("step", step, "wave", repr(wave.item()), "start", repr(start.item()), "ends", repr(ends.item()))
