# SPDX-License-Identifier: Apache-2.0
"""Models, optimizers and numbers of the trainings whose files are kept, and how their state is compared.

A change of these would need new files: add others instead.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

Tensors = dict[str, torch.Tensor]

WIDTH = 5
NUM_SAMPLES = 12
FEATURES = 3


def numbers(*sizes: int, start: float) -> torch.Tensor:
    """Return numbers that are the same in every version of torch."""
    count = torch.arange(math.prod(sizes), dtype=torch.float64)
    return torch.sin(count * 1.7 + start).reshape(sizes)


class Block(nn.Module):
    """A residual block whose layers tensor parallelism knows how to split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 6)
        self.act = nn.Tanh()
        self.down = nn.Linear(6, WIDTH)
        self.register_buffer("gain", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x)))) * self.gain.mean()


def net(start: float) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), Block(), Block(), nn.Linear(WIDTH, 2)).double()
    with torch.no_grad():
        for number, tensor in enumerate([*model.parameters(), *model.buffers()]):
            tensor.copy_(numbers(*tensor.shape, start=start + number))
    return model


def tied(start: float) -> nn.Sequential:
    """Return a model with one weight under two names."""
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES))
    model = model.double()
    model[1].weight = model[0].weight
    with torch.no_grad():
        for number, tensor in enumerate(model.parameters()):
            tensor.copy_(numbers(*tensor.shape, start=start + number))
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def tensors_of(tree: object, path: str = "") -> Tensors:
    """Return tensors and numbers of nested dicts by their path, each whole. Called by: every rank that shares them."""
    if isinstance(tree, int | float):
        return {path: torch.tensor(tree)}
    if isinstance(tree, torch.Tensor):
        whole = tree.full_tensor() if hasattr(tree, "full_tensor") else tree
        return {} if tree.is_meta else {path: whole.detach().clone().contiguous()}
    entries = tree.items() if isinstance(tree, dict) else ()
    found: Tensors = {}
    for key, value in entries:
        found |= tensors_of(value, f"{path}/{key}" if path else str(key))
    return found


def same_values(found: Any, expected: Any) -> bool:
    """Return whether two trees have the same types and the same bits."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, torch.Tensor | np.ndarray):
        as_bytes = [torch.as_tensor(one).contiguous().reshape(-1).view(torch.uint8) for one in (found, expected)]
        return (found.dtype, found.shape) == (expected.dtype, expected.shape) and torch.equal(*as_bytes)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same_values(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same_values, found, expected))
    return bool(found == expected or (found != found and expected != expected))  # noqa: PLR0124 - not a number
