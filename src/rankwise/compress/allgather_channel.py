# SPDX-License-Identifier: Apache-2.0
"""Channels whose compressed messages cannot be added up: all are gathered together at the end of backward.

Sent are the largest numbers of each rank, or all of them as integers of one byte: blocks [b] of BLOCK numbers, one
scale each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch.nn.functional import pad

from rankwise.tensors.arrays import bytes_of

if TYPE_CHECKING:
    from rankwise.comm.backends.protocol import ChannelSize, Exchange


class ErrorFeedback:
    """The compression error of this rank so far, per unit of its weight: steps may weigh differently.

    Args:
        like: the body of the channel.
        shapes: of the gradients in it, in order.
    """

    def __init__(self, like: torch.Tensor, shapes: Sequence[torch.Size]) -> None:
        self.left_out = torch.zeros_like(like)
        """[num_elements] of its channel."""
        self._lengths = [math.prod(shape) for shape in shapes]
        self._weight = 0.0
        self._absent: Sequence[int] = ()

    def pieces(self) -> Sequence[torch.Tensor]:
        """Return the part of each gradient in ``left_out``."""
        return self.left_out.split(self._lengths)

    def add_to(self, body: torch.Tensor, share: float, weight: float, absent: Sequence[int]) -> None:
        """Add the earlier error to this rank's body, which counts as zero with share 0.

        Args:
            body: [num_elements].
            share: of the body.
            weight: of this rank.
            absent: numbers of the gradients that this rank does not have.
        """
        self._weight = weight
        self._absent = absent
        if share == 0.0:
            body.zero_()
        body.add_(self.left_out, alpha=weight)

    def leave_out(self, left: torch.Tensor, mean_weight: float, is_used: Callable[[int], bool]) -> None:
        """Note the new error.

        Args:
            left: [num_elements] not sent.
            mean_weight: of all ranks. A rank of weight zero keeps its error, and may add some from rounding a sum.
            is_used: whether any rank has a gradient, by number. The error of one that none has does not change.
        """
        unused = [number for number in self._absent if not is_used(number)]
        pieces = self.pieces() if unused else ()
        kept = [(pieces[number], pieces[number].clone()) for number in unused]
        if self._weight > 0:
            torch.div(left, self._weight, out=self.left_out)
        elif mean_weight > 0:
            self.left_out.add_(left, alpha=1.0 / mean_weight)
        # Otherwise one overflow would stay forever.
        self.left_out.nan_to_num_(0.0, 0.0, 0.0)
        for piece, before in kept:
            piece.copy_(before)


@runtime_checkable
class HasErrorFeedback(Protocol):
    """A channel with error feedback."""

    feedback: ErrorFeedback


WEIGHT_BYTES = 8
BLOCK = 256
PACKED = BLOCK + 4
"""Bytes of a block and its scale."""
MOST = 127.0

CompressedSum = Callable[[torch.Tensor, Sequence[torch.Tensor]], tuple[torch.Tensor, list[torch.Tensor]]]
"""Adds up the gradients of several channels over ranks, compressed.

Given are bytes [n] to report to every rank, and the gradients of each channel, in which the compression error stays.
Returns the reports of all ranks [world_size, n], and the sum over ranks of each channel: the same bits on every rank,
also if their processors differ.
"""


class SharedAllGather:
    """The common part of the channels of one device: all are gathered when the first of them is waited for."""

    def __init__(self, exchange: Exchange, compressed_sum: CompressedSum) -> None:
        self.exchange = exchange
        self.channels: list[AllGatherChannel] = []
        self.weight = 0.0
        """Of this rank; after the gather, of all ranks."""
        self._sum = compressed_sum
        self._is_over = False

    def prepare(self, weight: float) -> None:
        """Begin a step."""
        self._is_over = False
        self.weight = weight

    def gather(self) -> None:
        """Gather all channels and divide their sums, once per step."""
        if self._is_over:
            return
        weight = torch.tensor([self.weight], dtype=torch.float64)
        reported = torch.cat([bytes_of(weight), *[channel.flags for channel in self.channels]])
        bodies = [channel.body for channel in self.channels]
        all_reported, sums = self._sum(reported.to(bodies[0].device), bodies)
        rows = all_reported.cpu()
        weights = rows[:, :WEIGHT_BYTES].clone(memory_format=torch.contiguous_format)
        # Added in the same order on every processor.
        self.weight = sum(weights.view(torch.float64)[:, 0].tolist())
        flags = rows[:, WEIGHT_BYTES:].amax(0).split([len(channel.flags) for channel in self.channels])
        for channel, total, of_channel in zip(self.channels, sums, flags, strict=True):
            channel.arrive(total, self.weight, of_channel)
        self._is_over = True


class AllGatherChannel:
    """See :class:`rankwise.comm.backends.protocol.BucketChannel`.

    Args:
        all_gather: shared by the channels of its device.
        size: of the channel.
        shapes: of the gradients in it, in order.
    """

    def __init__(self, all_gather: SharedAllGather, size: ChannelSize, shapes: Sequence[torch.Size]) -> None:
        self._all_gather = all_gather
        self.body = self.result = torch.zeros(size.num_elements, dtype=size.dtype, device=size.device)
        self.feedback = ErrorFeedback(self.body, shapes)
        self.flags = torch.ones(size.num_flags, dtype=torch.uint8)
        all_gather.channels.append(self)

    def can_claim(self) -> bool:
        """Return whether no check must run first."""
        return self._all_gather.exchange.detector.check is None

    def claim(self) -> None:
        """Do nothing: the body belongs to this rank alone."""

    def factor(self, share: float) -> float:
        """Return the share: the sum is divided by the total weight."""
        return share

    @torch.no_grad()
    def start(self, share: float, weight: float, absent: Sequence[int]) -> None:
        """Prepare the body for sending."""
        self._all_gather.prepare(weight)
        self.feedback.add_to(self.body, share, weight, absent)
        self.flags = torch.ones_like(self.flags)
        self.flags[list(absent)] = 0

    @torch.no_grad()
    def finish(self) -> None:
        """Gather all channels."""
        self._all_gather.gather()

    def arrive(self, total: torch.Tensor, weight: float, flags: torch.Tensor) -> None:
        """Keep the compression error in the body, and replace it by the mean."""
        self.flags = flags
        self.feedback.leave_out(self.body, weight / self._all_gather.exchange.world_size, self.is_flag_set)
        torch.mul(total, 1.0 / weight if weight > 0 else 0.0, out=self.result)

    def total(self) -> float:
        """Return the sum of the weights."""
        return self._all_gather.weight

    def is_flag_set(self, flag: int) -> bool:
        """Return whether any rank has set a flag."""
        return bool(self.flags[flag].item())


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
