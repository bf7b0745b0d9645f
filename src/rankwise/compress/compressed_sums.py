# SPDX-License-Identifier: Apache-2.0
"""Sums over ranks of compressed gradients: the largest numbers of each rank, or all of them as integers of one byte.

Each function is a :class:`rankwise.compress.allgather_channel.CompressedSum` once its first arguments are
bound. Legend: b blocks of BLOCK numbers, one scale each.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from rankwise.tensors.arrays import bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Exchange

BLOCK = 256
PACKED = BLOCK + 4
"""Bytes of a block and its scale."""
MOST = 127.0


def sum_of_largest(
    exchange: Exchange, share: float, what: str, reported: torch.Tensor, given: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Add up the largest numbers of every rank, which are sent with their places."""
    pieces = [reported]
    for body in given:
        places = body.abs().topk(math.ceil(share * len(body)), sorted=False).indices
        pieces += [bytes_of(body[places]), bytes_of(places.int())]
        body[places] = 0.0
    rows = exchange.all_gather(torch.cat(pieces), what=f"{what}: largest")
    totals = [torch.zeros_like(body) for body in given]
    for row in rows:
        _, *of_channels = row.split([len(piece) for piece in pieces])
        for total, numbers, places in zip(totals, of_channels[::2], of_channels[1::2], strict=True):
            # Copied for alignment: these bytes may begin anywhere.
            total.index_add_(0, places.clone().view(torch.int32), numbers.clone().view(total.dtype))
    return rows[:, : len(reported)], totals


def sum_of_quantised(
    exchange: Exchange, what: str, reported: torch.Tensor, given: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Add up numbers that are sent as integers.

    Each rank adds up a slice: it receives that slice of every rank, quantised, and sends all of them the sum, quantised
    again. Two ranks send each other everything: as many bytes, in one message.
    """
    if exchange.world_size <= 2:  # noqa: PLR2004 - a pair
        return _sum_in_one_pass(exchange, what, reported, given)
    return _sum_in_slices(exchange, what, reported, given)


def _sum_in_one_pass(
    exchange: Exchange, what: str, reported: torch.Tensor, given: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    packed = [_split_off(body, 1).view(-1) for body in given]
    rows = exchange.all_gather(torch.cat([reported, *packed]), what=f"{what}: all of each")
    sums: list[torch.Tensor] = []
    start = len(reported)
    for body, piece in zip(given, packed, strict=True):
        first, *others = [_unpack(row[start : start + len(piece)], body.dtype) for row in rows]
        for other in others:
            first += other
        sums.append(first.view(-1)[: len(body)])
        start += len(piece)
    return rows[:, : len(reported)], sums


def _sum_in_slices(
    exchange: Exchange, what: str, reported: torch.Tensor, given: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    ranks, rank = exchange.world_size, exchange.rank
    packed = [_split_off(body, ranks) for body in given]
    lengths = [len(reported), *[piece.shape[1] for piece in packed]]
    num_bytes = sum(lengths)
    taken = exchange.all_to_all(
        # For each rank: the report, and its slice of each channel.
        torch.cat([reported.expand(ranks, -1), *packed], 1).view(-1),
        [[num_bytes] * ranks] * ranks,
        what=f"{what}: slices",
    ).view(ranks, -1)
    all_reported, *slices = taken.split(lengths, 1)
    own: list[torch.Tensor] = []
    for body, slice_ in zip(given, slices, strict=True):
        total = _unpack(slice_, body.dtype).view(ranks, -1, BLOCK).sum(0)
        packed_sum, sent = _pack(total)
        own.append(packed_sum)
        # Rounding the sum leaves a rest too, which this rank adds to its next gradients.
        left = body[rank * total.numel() : (rank + 1) * total.numel()]
        left += (total - sent).view(-1)[: len(left)]
    rows = exchange.all_gather(torch.cat(own), what=f"{what}: sums")
    pieces = rows.split([len(piece) for piece in own], 1)
    return all_reported, [
        _unpack(piece, body.dtype).view(-1)[: len(body)] for piece, body in zip(pieces, given, strict=True)
    ]


def _split_off(body: torch.Tensor, num_slices: int) -> torch.Tensor:
    """Return ``body`` as [num_slices, bytes], and leave in it the rounding error of those bytes."""
    num_blocks = -(-len(body) // (BLOCK * num_slices)) * num_slices
    packed, sent = _pack(pad(body, (0, num_blocks * BLOCK - len(body))).view(-1, BLOCK))
    body -= sent.view(-1)[: len(body)]
    return packed.view(num_slices, -1)


def _pack(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [b, BLOCK] numbers as bytes, and the numbers that those bytes stand for."""
    scales = (numbers.abs().amax(1, keepdim=True) / MOST).float()
    # The scale of a block with an infinite number or a NaN is NaN.
    scales = torch.where(scales.isfinite(), scales, float("nan"))
    steps = torch.where(scales > 0, scales, 1.0)
    integers = (numbers / steps).round_().clamp_(-MOST, MOST).nan_to_num_(0.0).to(torch.int8)
    packed = torch.cat([integers.view(torch.uint8), bytes_of(scales.contiguous()).view(-1, 4)], 1)
    return packed.view(-1), (integers.to(numbers.dtype) * scales).to(numbers.dtype)


def _unpack(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers [b, BLOCK] that bytes stand for."""
    rows = packed.reshape(-1, PACKED)
    # Copied for alignment: these bytes may begin anywhere.
    scales = rows[:, BLOCK:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (rows[:, :BLOCK].contiguous().view(torch.int8).to(dtype) * scales).to(dtype)
