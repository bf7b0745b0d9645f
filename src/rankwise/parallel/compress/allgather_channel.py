# SPDX-License-Identifier: Apache-2.0
"""Channels for ways of compressing that are no sum of what ranks send: all travel together when backward has run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from rankwise.parallel.compress.error_feedback import ErrorFeedback
from rankwise.tensors.as_bytes import bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import ChannelSize, Exchange

WEIGHT_BYTES = 8


class CompressedSum(Protocol):
    """How gradients of several lanes go."""

    def __call__(
        self, reported: torch.Tensor, given: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Send what this rank gives, all lanes at a time.

        Args:
            reported: [n] bytes, for every rank.
            given: of each lane. What is left out stays in it.

        Returns:
            What every rank reported [world_size, n], and the sum over ranks of each lane: the same bits on every rank,
            also where their processors differ.
        """
        ...


class SharedAllGather:
    """What the lanes of one device have in common: they travel when the first of them is waited for."""

    def __init__(self, exchange: Exchange, compressed_sum: CompressedSum) -> None:
        self.exchange = exchange
        self.channels: list[AllGatherChannel] = []
        self.weight = 0.0
        """Of this rank; then of all."""
        self._sum = compressed_sum
        self._is_over = False

    def prepare(self, weight: float) -> None:
        """Begin a step."""
        self._is_over = False
        self.weight = weight

    def travel(self) -> None:
        """Send everything of all channels, and divide the sums, once in a step."""
        if self._is_over:
            return
        weight = torch.tensor([self.weight], dtype=torch.float64)
        reported = torch.cat([bytes_of(weight), *[channel.flags for channel in self.channels]])
        bodies = [channel.body for channel in self.channels]
        all_reported, sums = self._sum(reported.to(bodies[0].device), bodies)
        rows = all_reported.cpu()
        weights = rows[:, :WEIGHT_BYTES].clone(memory_format=torch.contiguous_format)
        # In one order on every processor.
        self.weight = sum(weights.view(torch.float64)[:, 0].tolist())
        flags = rows[:, WEIGHT_BYTES:].amax(0).split([len(channel.flags) for channel in self.channels])
        for channel, total, of_channel in zip(self.channels, sums, flags, strict=True):
            channel.arrive(total, self.weight, of_channel)
        self._is_over = True


class AllGatherChannel:
    """See :class:`rankwise.comm.backends.protocol.BucketChannel`.

    Args:
        journey: on which it goes.
        size: of the channel.
        shapes: of the gradients in it, one behind the other.
    """

    def __init__(self, all_gather: SharedAllGather, size: ChannelSize, shapes: Sequence[torch.Size]) -> None:
        self._all_gather = all_gather
        self.body = self.result = torch.zeros(size.num_elements, dtype=size.dtype, device=size.device)
        self.feedback = ErrorFeedback(self.body, shapes)
        self.flags = torch.ones(size.num_flags, dtype=torch.uint8)
        all_gather.channels.append(self)

    def can_claim(self) -> bool:
        """Return whether nothing is to be compared first."""
        return self._all_gather.exchange.detector.check is None

    def claim(self) -> None:
        """Do nothing: the body is this rank's alone."""

    def factor(self, share: float) -> float:
        """Return the share: the sum is divided by the weights."""
        return share

    @torch.no_grad()
    def start(self, share: float, weight: float, absent: Sequence[int]) -> None:
        """Note what is to be sent."""
        self._all_gather.prepare(weight)
        self.feedback.add_to(self.body, share, weight, absent)
        self.flags = torch.ones_like(self.flags)
        self.flags[list(absent)] = 0

    @torch.no_grad()
    def finish(self) -> None:
        """Travel with the others."""
        self._all_gather.travel()

    def arrive(self, total: torch.Tensor, weight: float, flags: torch.Tensor) -> None:
        """Remember what the body has left, and put the mean in its place."""
        self.flags = flags
        self.feedback.leave_out(self.body, weight / self._all_gather.exchange.world_size, self.is_flag_set)
        torch.mul(total, 1.0 / weight if weight > 0 else 0.0, out=self.result)

    def total(self) -> float:
        """Return the sum of the weights."""
        return self._all_gather.weight

    def is_flag_set(self, flag: int) -> bool:
        """Return whether any rank has set a flag."""
        return bool(self.flags[flag].item())
