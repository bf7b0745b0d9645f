# SPDX-License-Identifier: Apache-2.0
"""Many gradients that travel as one.

Plans which parameters share a bucket, and moves their gradients into its channel and back. Used by gradient_buckets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from rankwise.comm.backends.protocol import ChannelSize
from rankwise.torch_private import foreach
from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import BucketChannel

FIRST_BUCKET_BYTES = 2**20
COARSE_BYTES = 2**16
"""Mean size of a gradient from which on memory costs more than calls."""


def plan(
    parameters: Sequence[torch.Tensor], order: Sequence[int], first_bytes: int, limit_bytes: int
) -> list[list[int]]:
    """Return buckets of parameter numbers, filled in ``order``.

    Parameters of one dtype and device share buckets. A bucket closes when it reaches its limit; the first
    closes early, so that reducing starts early.

    Args:
        parameters: all of them.
        order: their numbers, in the order their gradients arrive.
        first_bytes: limit of the first bucket of each kind.
        limit_bytes: limit of the others.
    """
    closed: list[list[int]] = []
    open_of: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    limit_of: dict[tuple[torch.dtype, torch.device], int] = {}
    for number in order:
        parameter = parameters[number]
        kind = (parameter.dtype, parameter.device)
        members, size_bytes = open_of.get(kind, ([], 0))
        members.append(number)
        size_bytes += own_part(parameter).nbytes
        if size_bytes >= limit_of.get(kind, first_bytes):
            closed.append(members)
            limit_of[kind] = limit_bytes
            members, size_bytes = [], 0
        open_of[kind] = (members, size_bytes)
    return closed + [members for members, _ in open_of.values() if members]


def divide_by_size(sizes: Sequence[int], num_owners: int) -> list[list[int]]:
    """Return the numbers of the parameters that each owner gets: whole ones, about equally many bytes each.

    The largest go first, each to the owner with the least; one that is larger than all others together is not split.
    """
    loads = [0] * num_owners
    owned: list[list[int]] = [[] for _ in loads]
    for number in sorted(range(len(sizes)), key=lambda one: (-sizes[one], one)):
        owner = loads.index(min(loads))
        loads[owner] += sizes[number]
        owned[owner].append(number)
    return [sorted(numbers) for numbers in owned]


class Bucket:
    """Gradients that travel together on a channel, each a view into it."""

    def __init__(self, numbers: Sequence[int], parameters: Sequence[torch.Tensor], channel: BucketChannel) -> None:
        self.numbers = list(numbers)
        self.parameters = [parameters[number] for number in numbers]
        self._is_split = any(own_part(parameter) is not parameter for parameter in self.parameters)
        self.channel = channel
        self._bodies = _views(channel.body, self.parameters)
        self._results = self._bodies if channel.result is channel.body else _views(channel.result, self.parameters)
        self._is_coarse = channel.body.nbytes >= COARSE_BYTES * max(len(self.parameters), 1)
        self.num_missing = len(self.parameters)
        self._num_absent = 0

    def note_arrival(self) -> int:
        """Note that one of its gradients is complete; return how many are not, less than 0 where one came again."""
        self.num_missing = missing = self.num_missing - 1
        return missing

    def start_over(self) -> None:
        """Begin a step: no gradient has arrived."""
        self.num_missing = len(self.parameters)

    @torch.no_grad()
    def send(self, share: float, weight: float) -> None:
        """Copy the gradients in and start the channel.

        A parameter without a gradient counts as zero.

        Args:
            share: what the gradients count; with 0 nothing of them gets in, not even a NaN.
            weight: this rank's part of what the sum is divided by.
        """
        self.channel.claim()
        gradients = [parameter.grad for parameter in self.parameters]
        if self._is_split:
            gradients = [own_gradient(parameter) for parameter in self.parameters]
        absent = [index for index, gradient in enumerate(gradients) if gradient is None]
        if share != 0.0:
            for index in absent:
                (self._bodies if self._is_coarse else self._results)[index].zero_()
            self._take(gradients, self.channel.factor(share))
        self.channel.start(share, weight, absent)
        self._num_absent = len(absent)

    def _take(self, gradients: Sequence[torch.Tensor | None], factor: float) -> None:
        if self._is_coarse:
            # One pass over memory, at the price of a call per gradient.
            for body, gradient in zip(self._bodies, gradients, strict=True):
                if gradient is not None:
                    torch.mul(gradient, factor, out=body)
            return
        # By way of the result: one large copy into memory that another core has read is much faster than many.
        pairs = [
            (place, gradient)
            for place, gradient in zip(self._results, gradients, strict=True)
            if gradient is not None and gradient is not place
        ]
        if pairs:
            foreach.copy_([place for place, _ in pairs], [gradient for _, gradient in pairs])
        torch.mul(self.channel.result, factor, out=self.channel.body)

    def take_back(self) -> None:
        """Wait for the means, and make each parameter's gradient a view of them.

        A parameter that no rank had a gradient for keeps ``grad=None``.
        """
        self.channel.finish()
        for index, (parameter, result) in enumerate(zip(self.parameters, self._results, strict=True)):
            # The flag is only read where this rank had nothing itself: reading one element is slow.
            if not self._num_absent or parameter.grad is not None or self.channel.is_flag_set(index):
                parameter.grad = gradient_of(parameter, result) if self._is_split else result
        self.start_over()

    def pieces(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the part of each parameter in something of its channel's size."""
        return flat.split([own_part(parameter).numel() for parameter in self.parameters])


def own_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of what this rank holds of a parameter."""
    gradient = parameter.grad
    if gradient is None or own_part(parameter) is parameter:
        return gradient
    placements = cast("Any", parameter).placements
    if cast("Any", gradient).placements != placements:
        gradient = cast("Any", gradient).redistribute(placements=placements)
    return own_part(gradient)


def gradient_of(parameter: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter from that of what this rank holds of it."""
    if own_part(parameter) is parameter:
        return own
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - most models have none, and it takes long to import

    spread = cast("DTensor", parameter)
    return DTensor.from_local(
        own, spread.device_mesh, spread.placements, run_check=False, shape=spread.shape, stride=spread.stride()
    )


def channel_size(numbers: Sequence[int], parameters: Sequence[torch.Tensor]) -> ChannelSize:
    """Return what a bucket of these parameters needs."""
    first = parameters[numbers[0]]
    num_elements = sum(own_part(parameters[number]).numel() for number in numbers)
    return ChannelSize(num_elements, len(numbers), first.dtype, first.device)


def _views(body: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a view of ``body`` per parameter, in the parameter's own memory format."""
    views = []
    offset = 0
    for parameter in map(own_part, parameters):
        piece = body[offset : offset + parameter.numel()]
        offset += parameter.numel()
        # empty_like gives the strides autograd uses: the parameter's own where they leave no holes.
        strides = torch.empty_like(parameter, device="meta").stride()
        views.append(piece.as_strided(parameter.size(), strides, piece.storage_offset()))
    return views
