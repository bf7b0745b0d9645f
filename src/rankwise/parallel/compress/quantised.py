# SPDX-License-Identifier: Apache-2.0
"""Sums of numbers that travel as integers of one byte.

Each rank adds up a slice: it takes that slice of every rank, quantised, and gives everyone the sum, quantised again.
Two ranks give each other everything: the bytes are as many, and travel once.
Legend: b blocks of BLOCK numbers, one scale each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from rankwise.tensors.as_bytes import bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Exchange

BLOCK = 256
PACKED = BLOCK + 4
"""Bytes of a block and its scale."""
MOST = 127.0


class SumOfQuantised:
    """Adds up over the ranks of an exchange."""

    def __init__(self, exchange: Exchange, what: str) -> None:
        self._exchange = exchange
        self._what = what

    def __call__(
        self, reported: torch.Tensor, given: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """See :class:`rankwise.parallel.compress.allgather_channel.CompressedSum`."""
        if self._exchange.world_size <= 2:  # noqa: PLR2004 - a pair
            return self._in_one_pass(reported, given)
        return self._in_slices(reported, given)

    def _in_one_pass(
        self, reported: torch.Tensor, given: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        packed = [_split_off(body, 1).view(-1) for body in given]
        rows = self._exchange.all_gather(torch.cat([reported, *packed]), what=f"{self._what}: all of each")
        sums: list[torch.Tensor] = []
        start = len(reported)
        for body, piece in zip(given, packed, strict=True):
            first, *others = [_unpack(row[start : start + len(piece)], body.dtype) for row in rows]
            for other in others:
                first += other
            sums.append(first.view(-1)[: len(body)])
            start += len(piece)
        return rows[:, : len(reported)], sums

    def _in_slices(
        self, reported: torch.Tensor, given: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        ranks, rank = self._exchange.world_size, self._exchange.rank
        packed = [_split_off(body, ranks) for body in given]
        lengths = [len(reported), *[piece.shape[1] for piece in packed]]
        num_bytes = sum(lengths)
        taken = self._exchange.all_to_all(
            # Rank by rank: what all are told, and that rank's slice of each lane.
            torch.cat([reported.expand(ranks, -1), *packed], 1).view(-1),
            [[num_bytes] * ranks] * ranks,
            what=f"{self._what}: slices",
        ).view(ranks, -1)
        all_reported, *slices = taken.split(lengths, 1)
        own: list[torch.Tensor] = []
        for body, slice_ in zip(given, slices, strict=True):
            total = _unpack(slice_, body.dtype).view(ranks, -1, BLOCK).sum(0)
            packed_sum, sent = _pack(total)
            own.append(packed_sum)
            # Rounding the sum leaves out some too: whoever added up gives it next time.
            left = body[rank * total.numel() : (rank + 1) * total.numel()]
            left += (total - sent).view(-1)[: len(left)]
        rows = self._exchange.all_gather(torch.cat(own), what=f"{self._what}: sums")
        pieces = rows.split([len(piece) for piece in own], 1)
        return all_reported, [
            _unpack(piece, body.dtype).view(-1)[: len(body)] for piece, body in zip(pieces, given, strict=True)
        ]


def _split_off(body: torch.Tensor, num_slices: int) -> torch.Tensor:
    """Return ``body`` as [num_slices, bytes], and leave in it what those bytes do not say."""
    num_blocks = -(-len(body) // (BLOCK * num_slices)) * num_slices
    packed, sent = _pack(pad(body, (0, num_blocks * BLOCK - len(body))).view(-1, BLOCK))
    body -= sent.view(-1)[: len(body)]
    return packed.view(num_slices, -1)


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
    rows = packed.reshape(-1, PACKED)
    # Copied: as they lie, bytes need not begin where a number may.
    scales = rows[:, BLOCK:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (rows[:, :BLOCK].contiguous().view(torch.int8).to(dtype) * scales).to(dtype)
