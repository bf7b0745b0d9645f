# SPDX-License-Identifier: Apache-2.0
"""Channels whose compressed messages cannot be added up: all are gathered together at the end of backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from rankwise.compress.error_feedback import ErrorFeedback
from rankwise.tensors.arrays import bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import ChannelSize, Exchange

WEIGHT_BYTES = 8


class CompressedSum(Protocol):
    """Adds up the gradients of several channels over ranks, compressed."""

    def __call__(
        self, reported: torch.Tensor, given: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Add up the gradients of all channels.

        Args:
            reported: [n] bytes, for every rank.
            given: gradients of each channel. The compression error stays in them.

        Returns:
            The reports of all ranks [world_size, n], and the sum over ranks of each channel: the same bits on every
            rank, also if their processors differ.
        """
        ...


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
