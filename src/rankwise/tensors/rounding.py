# SPDX-License-Identifier: Apache-2.0
"""Whether values are the same up to rounding, which differs between kinds of processors; compared once bits differ."""

from __future__ import annotations

from functools import cache

import torch

TOLERANCE = {"float64": 1e-8, "float32": 1e-4, "complex128": 1e-8, "complex64": 1e-4}
"""How much two ranks' values may differ by rounding after many steps, relative to the tensor's largest element."""
NARROW_TOLERANCE = 2e-2
"""The same for floating-point numbers of 16 bits or fewer."""
FLOOR = 1e-3
"""Lower bound of a tensor's largest element, relative to the model's: near zero, earlier rounding remains."""
NUM_COLUMNS = 251
CHUNK_ELEMENTS = NUM_COLUMNS * 2**14


def tolerance(dtype: torch.dtype) -> float:
    """Return how much a value of ``dtype`` may differ, relative to its largest element; 0 for integers."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return TOLERANCE.get(str(dtype).removeprefix("torch."), NARROW_TOLERANCE)


@torch.no_grad()
def summary_of(tensor: torch.Tensor) -> tuple[float, float]:
    """Return two numbers by which ranks compare a tensor without sending it: a projection, and its norm.

    Values that differ at random by a fraction of the norm have projections that differ by about that fraction.
    """
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = plain.detach().reshape(-1)
    weights = _weights(flat.device)
    projection, square = 0.0, 0.0
    for start in range(0, flat.numel(), CHUNK_ELEMENTS):
        wide = flat[start : start + CHUNK_ELEMENTS].double()
        rows = wide.numel() // NUM_COLUMNS * NUM_COLUMNS
        columns = wide[:rows].view(-1, NUM_COLUMNS).sum(0) * weights
        last = wide[rows:] * weights[: wide.numel() - rows]
        projection += float(columns.sum() + last.sum())
        square += float(wide.square().sum())
    return projection, square**0.5


def is_rounding(one: tuple[float, float], other: tuple[float, float], part: float) -> bool:
    """Return whether two summaries differ by at most ``part`` of the norm. NaN on both sides is the same."""
    if one == other or str(one) == str(other):
        return True
    return abs(one[0] - other[0]) <= part * max(one[1], other[1])


@cache
def _weights(device: torch.device) -> torch.Tensor:
    # Of both signs, and all different: the sum of a bias before softmax never changes, but its projection does.
    return torch.cos(torch.arange(1, NUM_COLUMNS + 1, dtype=torch.float64)).to(device)
