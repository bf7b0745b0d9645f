# SPDX-License-Identifier: Apache-2.0
"""Gradients of a wrapped optimizer that travel together, in buckets on lanes. Used by gradients."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from rankwise.exchange.protocol import LaneSize
from rankwise.parallel.buckets import MEBIBYTE_BYTES, Bucket, lane_size, plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from rankwise.exchange.protocol import Exchange, Lane

FIRST_BUCKET_BYTES = MEBIBYTE_BYTES


class _Carried(Protocol):
    """What both kinds of buckets offer."""

    numbers: list[int]
    parameters: list[nn.Parameter]
    lane: Lane
    num_missing: int

    def send(self, share: float, weight: float) -> None: ...

    def take_back(self) -> None: ...


class HalfBucket:
    """Gradients that travel as float16, and come back in the dtype they had."""

    def __init__(self, numbers: Sequence[int], parameters: Sequence[nn.Parameter], lane: Lane) -> None:
        self.numbers = list(numbers)
        self.parameters = [parameters[number] for number in numbers]
        self.lane = lane
        self.num_missing = len(self.parameters)
        sizes = [parameter.numel() for parameter in self.parameters]
        self._bodies = lane.body.split(sizes)
        self._results = lane.result.split(sizes)

    @torch.no_grad()
    def send(self, share: float, weight: float) -> None:
        """Round the gradients into the lane and start it. Every parameter has one."""
        self.lane.claim()
        factor = self.lane.factor(share)
        for parameter, body in zip(self.parameters, self._bodies, strict=True):
            if parameter.grad is not None:
                torch.mul(parameter.grad, factor, out=body.view(parameter.shape))
        self.lane.start(share, weight, ())

    @torch.no_grad()
    def take_back(self) -> None:
        """Wait for the means and write them into the gradients."""
        self.lane.finish()
        for parameter, result in zip(self.parameters, self._results, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(result.view(parameter.shape))
        self.num_missing = len(self.parameters)


class GradientLanes:
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
        members = plan(parameters, order, FIRST_BUCKET_BYTES, exchange.lane_bytes(device))
        halved = [is_half and parameters[numbers[0]].is_floating_point() for numbers in members]
        sizes = [
            _half_size(numbers, parameters) if half else lane_size(numbers, parameters)
            for numbers, half in zip(members, halved, strict=True)
        ]
        self._buckets: list[_Carried] = [
            HalfBucket(numbers, parameters, lane) if half else Bucket(numbers, parameters, lane)
            for numbers, half, lane in zip(members, halved, exchange.lanes(sizes, what), strict=True)
        ]
        self._bucket_of = {number: bucket for bucket in self._buckets for number in bucket.numbers}
        self._num_sent = 0

    def carries(self, number: int) -> bool:
        """Return whether the gradient of a parameter travels here."""
        return number in self._bucket_of

    def arrived(self, number: int) -> None:
        """Note that a gradient is complete, and send the buckets that are."""
        self._bucket_of[number].num_missing -= 1
        while self._num_sent < len(self._buckets):
            bucket = self._buckets[self._num_sent]
            # To wait here could be for ever: another rank may wait for this one elsewhere.
            if bucket.num_missing > 0 or not bucket.lane.can_claim():
                return
            self._send(bucket)

    def carry(self) -> None:
        """Send what has not been sent, and wait for the means. A parameter without a gradient counts as zero.

        Called by: every rank of the exchange, if only by :func:`stand_in`.
        """
        while self._num_sent < len(self._buckets):
            self._send(self._buckets[self._num_sent])
        for bucket in self._buckets:
            bucket.take_back()
        self._num_sent = 0

    def standing_in(self) -> Callable[[], None]:
        """Return what takes part in a step of the other ranks, with nothing. It keeps the lanes, no parameters."""
        return partial(stand_in, [bucket.lane for bucket in self._buckets], self._weight)

    def _send(self, bucket: _Carried) -> None:
        for parameter in bucket.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        bucket.send(self._share, self._weight)
        self._num_sent += 1


def stand_in(lanes: Sequence[Lane], weight: float) -> None:
    """Take part in a step of the other ranks, with nothing."""
    for lane in lanes:
        lane.claim()
        lane.start(0.0, weight, ())
    for lane in lanes:
        lane.finish()


def _half_size(numbers: Sequence[int], parameters: Sequence[nn.Parameter]) -> LaneSize:
    num_elements = sum(parameters[number].numel() for number in numbers)
    return LaneSize(num_elements, len(numbers), torch.float16, parameters[numbers[0]].device)
