# SPDX-License-Identifier: Apache-2.0
"""Sums of numbers that travel as integers of one byte.

Each rank adds up a slice: it takes that slice of every rank, quantised, and gives everyone the sum, quantised again.
Legend: b blocks of BLOCK numbers, one scale each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.exchange.bytes_of import bytes_of
from rankwise.parallel.compress.memory import Memory

if TYPE_CHECKING:
    from rankwise.exchange.protocol import Exchange

BLOCK = 256
MOST = 127.0


class Quantised:
    """Adds up over the ranks of an exchange, and remembers what rounding the sum of its slice left out."""

    def __init__(self, exchange: Exchange, num_elements: int, what: str) -> None:
        self._exchange = exchange
        self._what = what
        self._num_blocks = -(-num_elements // (BLOCK * exchange.world_size))
        self._memory: Memory | None = None

    def __call__(self, given: torch.Tensor, weight: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum over ranks, and what this rank has left out of its part."""
        ranks = self._exchange.world_size
        padded = given.new_zeros(ranks * self._num_blocks * BLOCK)
        padded[: len(given)] = given
        packed, sent = _pack(padded.view(-1, BLOCK))
        num_bytes = len(packed) // ranks
        taken = self._exchange.all_to_all(
            # Slice by slice: [ranks, blocks, BLOCK + scale] bytes.
            packed, [[num_bytes] * ranks] * ranks, what=f"{self._what}: slices"
        )  # fmt: skip
        total = _unpack(taken, given.dtype).view(ranks, self._num_blocks, BLOCK).sum(0)
        if self._memory is None:
            self._memory = Memory(total)
        self._memory.add_to(total, 1.0, weight)
        packed, own = _pack(total)
        self._memory.leave_out(total - own)
        sums = self._exchange.all_gather(packed, what=f"{self._what}: sums")
        return _unpack(sums.view(-1), given.dtype).view(-1)[: len(given)], given - sent.view(-1)[: len(given)]


def _pack(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [b, BLOCK] numbers as bytes, and as what those bytes say."""
    scales = (numbers.abs().amax(1, keepdim=True) / MOST).float()
    # A block with an infinite number, or none, says so: its scale is none.
    scales = torch.where(scales.isfinite(), scales, float("nan"))
    steps = torch.where(scales > 0, scales, 1.0)
    integers = (numbers / steps).round_().clamp_(-MOST, MOST).nan_to_num_(0.0).to(torch.int8)
    packed = torch.cat([integers.view(torch.uint8), bytes_of(scales.contiguous()).view(-1, 4)], 1)
    return packed.view(-1), (integers.to(numbers.dtype) * scales).to(numbers.dtype)


def _unpack(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers [b, BLOCK] that bytes say."""
    rows = packed.view(-1, BLOCK + 4)
    scales = rows[:, BLOCK:].contiguous().view(torch.float32)
    return (rows[:, :BLOCK].contiguous().view(torch.int8).to(dtype) * scales).to(dtype)
