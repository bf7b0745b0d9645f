# SPDX-License-Identifier: Apache-2.0
"""Collectives as carrier: a few numbers of each rank, and tensors, element by element, within rounding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from rankwise.tensors.checksum import FLOOR, tolerance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Exchange

CHUNK_ELEMENTS = 2**22
"""How much of a tensor is exchanged at a time."""


def numbers_of_all(exchange: Exchange, own: Sequence[int], what: str) -> list[list[int]]:
    """Return the integers of each rank, as many on each. Called by: every rank of ``exchange``."""
    return exchange.all_gather(torch.tensor(own), what=what).view(-1, len(own)).tolist()


def furthest_apart(tensor: torch.Tensor, exchange: Exchange, *, name: str, largest: float) -> int | None:
    """Return the index of the element that ranks differ most in; ``None`` if they differ by rounding at most.

    ``largest`` is the largest element of the model. Called by: every rank of ``exchange``, with the same result.
    """
    apart, index = _furthest_from_first(tensor.reshape(-1), exchange, name)
    own = torch.tensor([apart, float(index), largest_element(tensor)], dtype=torch.float64)
    rows = exchange.all_gather(own, what=f"the difference of {name}").tolist()
    furthest = max(rows, key=lambda row: row[0])
    allowed = tolerance(tensor.dtype) * max(FLOOR * largest, *(row[2] for row in rows))
    return int(furthest[1]) if furthest[0] > allowed else None


def _furthest_from_first(flat: torch.Tensor, exchange: Exchange, name: str) -> tuple[float, int]:
    """Return the largest difference of this rank's values from the first rank's, and its index: NaN equals NaN."""
    furthest, place = 0.0, 0
    for start in range(0, flat.numel(), CHUNK_ELEMENTS):
        own = flat[start : start + CHUNK_ELEMENTS].contiguous()
        first = exchange.broadcast(own, 0, what=f"{name} of the first rank")
        apart, index = furthest_from(own, first)
        if apart > furthest:
            furthest, place = apart, start + index
    return furthest, place


def furthest_from(own: torch.Tensor, first: torch.Tensor) -> tuple[float, int]:
    """Return the largest difference of two tensors of one dim, and its index: NaN equals NaN."""
    if not own.numel():
        return 0.0, 0
    wide = torch.complex128 if own.is_complex() else torch.float64
    mine, other = own.cpu().to(wide), first.cpu().to(wide)
    is_equal = (mine == other) | (mine.isnan() & other.isnan())
    apart = torch.where(is_equal, 0.0, (mine - other).abs()).nan_to_num(nan=math.inf)
    index = int(apart.argmax())
    return float(apart[index]), index


def largest_element(tensor: torch.Tensor) -> float:
    """Return the largest finite element of a tensor, without its sign."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return float(tensor.abs().nan_to_num(nan=0.0, posinf=0.0).max())
