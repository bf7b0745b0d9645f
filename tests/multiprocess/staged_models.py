# SPDX-License-Identifier: Apache-2.0
"""What the tests of pipelines share: a model that is hard to cut, batches, and how far a rank is from one device."""

from __future__ import annotations

import torch
from replicas import largest_difference
from torch import nn
from torch.nn import functional

mean_square = functional.mse_loss


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(self.norm(x))))


class Skipping(nn.Module):
    """A parameter and glue between blocks, a value that skips most stages, a block that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.ones(6))
        self.layers = nn.ModuleList([Residual(6) for _ in range(7)])
        self.act = nn.ReLU(inplace=True)
        self.never = nn.Linear(2, 2)
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = x + self.position
        scale = 1.0 + x.abs().mean(1, keepdim=True)
        h = skip
        for layer in self.layers:
            h = layer(h) / scale
        return self.head(torch.cat([h, self.act(skip * 1.5)], 1).view(x.shape[0], -1))


def drawn(*sizes: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def own(model: nn.Module, what: str = "grad") -> dict[str, torch.Tensor]:
    """Return the gradients or values of the parameters that are on this rank."""
    return {
        name: parameter.grad if what == "grad" else parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.device.type != "meta" and (what != "grad" or parameter.grad is not None)
    }


def difference(model: nn.Module, one: nn.Module, what: str = "grad") -> float:
    """Return how far this rank's parameters are from those of the model on one device."""
    found, expected = own(model, what), own(one, what)
    return largest_difference(found, {name: expected[name] for name in found})
