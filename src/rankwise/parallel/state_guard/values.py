# SPDX-License-Identifier: Apache-2.0
"""How far the values of one tensor are apart on all ranks, element by element, and whether that is rounding.

Used by diagnosis and parted_buffers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from rankwise.replicas.rounding import FLOOR, tolerance

if TYPE_CHECKING:
    from rankwise.exchange.protocol import Exchange

CHUNK_ELEMENTS = 2**22
"""How much of a tensor is exchanged at a time."""


def furthest_apart(tensor: torch.Tensor, exchange: Exchange, *, name: str, largest: float) -> int | None:
    """Return the number of the element that ranks differ most in; ``None`` where they differ by rounding at most.

    Called by: every rank of ``exchange``. The same on every rank.

    Args:
        tensor: of the same shape and dtype on every rank.
        exchange: the ranks.
        name: of the tensor.
        largest: element of the whole model.
    """
    apart, index = _furthest_from_first(tensor.reshape(-1), exchange, name)
    own = torch.tensor([apart, float(index), largest_element(tensor)], dtype=torch.float64)
    rows = exchange.all_gather(own, what=f"how far {name} is apart").tolist()
    furthest = max(rows, key=lambda row: row[0])
    allowed = tolerance(tensor.dtype) * max(FLOOR * largest, *(row[2] for row in rows))
    return int(furthest[1]) if furthest[0] > allowed else None


def _furthest_from_first(flat: torch.Tensor, exchange: Exchange, name: str) -> tuple[float, int]:
    """Return how far this rank's values are from those of the first, and where: NaN and NaN are the same."""
    furthest, place = 0.0, 0
    for start in range(0, flat.numel(), CHUNK_ELEMENTS):
        own = flat[start : start + CHUNK_ELEMENTS].contiguous()
        first = exchange.broadcast(own, 0, what=f"{name} of the first rank")
        apart, index = furthest_from(own, first)
        if apart > furthest:
            furthest, place = apart, start + index
    return furthest, place


def furthest_from(own: torch.Tensor, first: torch.Tensor) -> tuple[float, int]:
    """Return how far two tensors of one dim are apart, and in which element: NaN and NaN are the same."""
    if not own.numel():
        return 0.0, 0
    wide = torch.complex128 if own.is_complex() else torch.float64
    mine, other = own.cpu().to(wide), first.cpu().to(wide)
    is_same = (mine == other) | (mine.isnan() & other.isnan())
    apart = torch.where(is_same, 0.0, (mine - other).abs()).nan_to_num(nan=math.inf)
    index = int(apart.argmax())
    return float(apart[index]), index


def largest_element(tensor: torch.Tensor) -> float:
    """Return the largest finite element of a tensor, without its sign."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return float(tensor.abs().nan_to_num(nan=0.0, posinf=0.0).max())
