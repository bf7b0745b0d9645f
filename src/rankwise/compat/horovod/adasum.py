# SPDX-License-Identifier: Apache-2.0
"""Adasum: sums gradients that point apart, averages those that agree (Maleki et al., arXiv:2006.02924)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

# Below this the quotient says nothing any more; the tensor is as good as zero and does not count.
_SMALLEST_SQUARE = sys.float_info.min**0.5
# torch adds up more numbers than this by as many threads as there are: the last bits would differ between ranks.
_SUMMED_AT_ONCE = 4096


def adasum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Combine the tensors of all ranks, neighbours first, then pairs of pairs.

    Args:
        values: of each rank in rank order, of one shape and dtype; their number is a power of two.

    Returns:
        A new tensor of the same shape and dtype. Computed in float64 and rounded once.

    Source: arXiv:2006.02924, the pairwise rule and its recursion.
    """
    level = [value.double() for value in values]
    while len(level) > 1:
        level = [_pair(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0].to(values[0].dtype, copy=True)


def _pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b."""
    common = _sum(a * b)
    return _share(a, common) * a + _share(b, common) * b


def _share(tensor: torch.Tensor, common: float) -> float:
    square = _sum(tensor.square())
    return 1.0 - 0.5 * common / square if square >= _SMALLEST_SQUARE else 1.0


def _sum(numbers: torch.Tensor) -> float:
    """Return the sum, the same bits however many threads there are."""
    flat = numbers.flatten()
    while flat.numel() > _SUMMED_AT_ONCE:
        num_rows, rest = divmod(flat.numel(), _SUMMED_AT_ONCE)
        rows = flat[: num_rows * _SUMMED_AT_ONCE].view(num_rows, _SUMMED_AT_ONCE).sum(dim=1)
        flat = torch.cat([rows, flat[flat.numel() - rest :].sum().view(1)])
    return float(flat.sum())
