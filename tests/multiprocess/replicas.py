# SPDX-License-Identifier: Apache-2.0
"""What the tests of replicate share: a model, batches, and a measure of how far two results are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


Parameters = dict[str, torch.Tensor]
TOLERANCE = 1e-10


def largest_difference(left: Parameters, right: Parameters) -> float:
    """Return the largest difference, relative to the largest element of each tensor."""
    assert left.keys() == right.keys()
    return max(
        (((left[k] - right[k]).abs().max() / right[k].abs().max().clamp(min=1e-6)).item() for k in right),
        default=0.0,
    )


def part(tensor: torch.Tensor, index: int, count: int) -> torch.Tensor:
    """Return piece ``index`` of ``count``, split as evenly as it goes, the first ones longer."""
    return tensor.tensor_split(count)[index]


class Net(nn.Module):
    """Tied layers, a layer that is never used, one that only odd ranks use, optional BatchNorm."""

    def __init__(self, *, batchnorm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=not batchnorm)
        self.norm = nn.BatchNorm1d(8) if batchnorm else nn.Identity()
        self.second = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.second.weight
        self.last = nn.Linear(8, 3)
        self.never = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(torch.tanh(self.tied(torch.tanh(self.second(x)))))


def batches(sizes: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 6, generator=generator, dtype=torch.float64),
            torch.randn(size, 3, generator=generator, dtype=torch.float64),
        )
        for size in sizes
    ]


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()
