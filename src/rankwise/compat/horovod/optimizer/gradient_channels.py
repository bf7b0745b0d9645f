# SPDX-License-Identifier: Apache-2.0
"""Gradients of a wrapped optimizer that travel together, in buckets on channels. Used by gradients."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from rankwise.parallel.compress.methods import Narrow
from rankwise.parallel.compress.open_channels import open_channels
from rankwise.parallel.core.buckets import MEBIBYTE_BYTES, Bucket, BucketQueue, channel_size, plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import BucketChannel, Exchange

FIRST_BUCKET_BYTES = MEBIBYTE_BYTES


class GradientChannels:
    """The lanes of one optimizer's gradients.

    A step is: :meth:`arrived` for each gradient that is there to stay, then :meth:`carry`; or :func:`stand_in` on a
    rank that has no more steps.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        order: Sequence[int],
        exchange: Exchange,
        *,
        share: float,
        weight: float,
        is_half: bool,
        what: str,
    ) -> None:
        """Open them.

        Called by: every rank of ``exchange``, with the same arguments.

        Args:
            parameters: all of the optimizer.
            order: numbers of those whose gradients travel here, in the order they usually arrive.
            exchange: the ranks.
            share: what each gradient is multiplied with; the sum is divided by the sum of the weights.
            weight: of every rank, also of one that has no more steps.
            is_half: whether floating-point gradients travel as float16.
            what: travels, in words.
        """
        self._share, self._weight = share, weight
        device = parameters[order[0]].device
        members = plan(parameters, order, FIRST_BUCKET_BYTES, exchange.channel_bytes(device))
        sizes = [channel_size(numbers, parameters) for numbers in members]
        shapes = [[parameters[number].shape for number in numbers] for numbers in members]
        channels = open_channels(Narrow("fp16") if is_half else None, exchange, sizes, shapes, what)
        buckets = [Bucket(numbers, parameters, channel) for numbers, channel in zip(members, channels, strict=True)]
        self._buckets = BucketQueue(buckets)
        self._bucket_of = {number: bucket for bucket in buckets for number in bucket.numbers}

    def carries(self, number: int) -> bool:
        """Return whether the gradient of a parameter travels here."""
        return number in self._bucket_of

    def arrived(self, number: int) -> None:
        """Note that a gradient is complete, and send the buckets that are."""
        self._bucket_of[number].note_arrival()
        for bucket in self._buckets.full():
            self._send(bucket)

    def carry(self) -> None:
        """Send what has not been sent, and wait for the means. A parameter without a gradient counts as zero.

        Called by: every rank of the exchange, if only by :func:`stand_in`.
        """
        for bucket in self._buckets.rest():
            self._send(bucket)
        self._buckets.take_back()
        self._buckets.start_over()

    def standing_in(self) -> Callable[[], None]:
        """Return what takes part in a step of the other ranks, with nothing. It keeps the lanes, no parameters."""
        return partial(stand_in, [bucket.channel for bucket in self._buckets.buckets], self._weight)

    def _send(self, bucket: Bucket) -> None:
        for parameter in bucket.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        bucket.send(self._share, self._weight)


def stand_in(channels: Sequence[BucketChannel], weight: float) -> None:
    """Take part in a step of the other ranks, with nothing."""
    for channel in channels:
        channel.claim()
        channel.start(0.0, weight, ())
    for channel in channels:
        channel.finish()
