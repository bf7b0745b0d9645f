# SPDX-License-Identifier: Apache-2.0
"""A model that is hard to shard, for the tests of shard."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """Odd sizes, a frozen layer, one that is never used and one that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 5)
        self.down = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.never = nn.Linear(3, 3)
        self.seldom = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor, seldom: bool) -> torch.Tensor:
        y = x + self.down(torch.tanh(self.up(self.frozen(x))))
        return y + self.seldom(x) if seldom else y


class Deep(nn.Module):
    """Three blocks, two of which share a parameter, and a parameter that does not lie in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.back = nn.Linear(7, 6)
        self.last = nn.Linear(6, 3)
        self.layers[2].up.weight = self.layers[0].up.weight
        self.back.weight = nn.Parameter(self.first.weight.T.clone())
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor, seldom: bool = False) -> torch.Tensor:
        x = torch.tanh(self.first(x)) * self.scale
        for layer in self.layers:
            x = layer(x, seldom)
        return self.last(self.back(x))
