# SPDX-License-Identifier: Apache-2.0
"""The gradients that are sent together on one channel, each a view into it: how they get there and back.

Also what the gradients of one rank count in the mean over ranks. Owned by ``gradient_buckets``, which decides when.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch

from rankwise.comm.backends.protocol import TakesOwnPart
from rankwise.compress.allgather_channel import HasErrorFeedback
from rankwise.torch_private.dtensor import own_part
from rankwise.torch_private.tensors import foreach_copy_
from rankwise.world.device.streams import current_stream, stream_query

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Amount, BucketChannel, Exchange

COARSE_BYTES = 2**16
"""Mean size of a gradient above which memory traffic costs more than calls."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What one rank's gradients count: each becomes ``sum_r share_r g_r / sum_r weight_r``.

    For the mean over samples both are this rank's number of samples, for the mean over n ranks both are 1, and for
    their sum a share of 1 goes with a weight of 1/n.
    """

    share: Amount
    """The factor for this rank's gradients; with 0 nothing of them counts, not even a NaN."""
    weight: Amount
    """This rank's part of the divisor of the sum."""


class WeightUnit:
    """The unit in which ranks count the weights of a step, so that gradients neither overflow nor lose bits.

    It follows the mean weight of earlier steps. float16 has no room for weights in an arbitrary unit.
    """

    def __init__(self, *, is_open: bool) -> None:
        """Start with a unit of one.

        Args:
            is_open: whether the first step must agree on a unit before it sends anything, which float16 needs.
        """
        self.size = 1.0
        self.scale = 1.0
        """The factor for everything that this step sends: one over the unit that it agreed on, or one."""
        self.is_open = is_open
        self._known_share: tuple[torch.Tensor, torch.Tensor] | None = None

    def share_on_device(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight of a backward in units, the same tensor for the same weight."""
        if self._known_share is None or self._known_share[0] is not weight:
            self._known_share = weight, weight / self.size
        return self._known_share[1]

    def agree(self, group: Exchange, own_weight: Amount, what: str) -> None:
        """Make the mean weight of the ranks' step the unit of the next send.

        Called by: every rank of ``group``.

        Args:
            group: the ranks.
            own_weight: of this rank's step.
            what: the name of the values that are sent.
        """
        own = torch.tensor([float(own_weight)], dtype=torch.float64)
        total = group.all_reduce(own, what=f"weights of {what}").item()
        if total > 0:
            self.scale = 1.0 / power_near(total / group.world_size)
            self.is_open = False

    def adjust(self, mean: float) -> None:
        """Use the mean weight of the ranks' last step, in units, for the next steps, unless it is zero."""
        if mean > 0:
            self.size = power_near(self.size * mean)
            self.scale = 1.0


def power_near(weight: float) -> float:
    """Return the power of two nearest to a weight."""
    # Multiplying by a power of two rounds nothing. So a step after a resume, whose unit is 1, or a float16 step, which
    # has its own, computes the same bits as in the undisturbed run.
    return 2.0 ** round(math.log2(weight))


class Scratch:
    """Memory of this rank that buckets use in turn: one large copy into memory that another core has read is faster."""

    def __init__(self) -> None:
        self._largest: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def like(self, body: torch.Tensor) -> torch.Tensor:
        """Return memory of the size of ``body`` [num_elements], which other calls return too."""
        key = body.dtype, body.device
        if key not in self._largest or len(self._largest[key]) < len(body):
            self._largest[key] = torch.empty_like(body)
        return self._largest[key][: len(body)]


class Bucket:
    """Gradients that are sent together on a channel, each a view into it.

    Its many fields are views of the channel's memory and of memory next to it, made once so that a step makes none.
    """

    def __init__(
        self, numbers: Sequence[int], parameters: Sequence[torch.Tensor], channel: BucketChannel, scratch: Scratch
    ) -> None:
        self.numbers = list(numbers)
        self.parameters = [parameters[number] for number in numbers]
        self._is_split = any(own_part(parameter) is not parameter for parameter in self.parameters)
        self.channel = channel
        self._bodies = _views(channel.body, self.parameters)
        self._result = channel.result
        self._results = self._bodies if self._result is channel.body else _views(self._result, self.parameters)
        self._is_coarse = channel.body.nbytes >= COARSE_BYTES * max(len(self.parameters), 1)
        self._flat, self._pieces = channel.body, self._bodies
        """Where gradients are collected before the body is written."""
        if not self._is_coarse and self._result is not channel.body:
            self._flat = scratch.like(channel.body)
            self._pieces = _views(self._flat, self.parameters)
        self._num_absent = 0
        self._stream_now = stream_query(channel.body.device)
        self.follows_streams = self._stream_now is not None
        """Whether :meth:`note_stream` must be called for each complete gradient."""
        self._streams: set[torch.Stream] = set()
        """The streams that this step's gradients were computed on."""

    def shapes(self) -> list[torch.Size]:
        """Return the shapes of the gradients that fit the channel."""
        return [body.shape for body in self._bodies]

    def note_stream(self) -> None:
        """Note that a gradient is complete, computed on the current stream."""
        if self._stream_now is not None:
            self._streams.add(self._stream_now())

    def forget_streams(self) -> None:
        """Begin a step: no gradient has arrived."""
        self._streams.clear()

    @torch.no_grad()
    def send(self, weights: Weights) -> None:
        """Copy the gradients into the claimed channel and start it. A parameter without a gradient counts as zero."""
        own = own_gradient if self._is_split else attrgetter("grad")
        gradients: list[torch.Tensor | None] = [*map(own, self.parameters)]
        absent = [index for index, gradient in enumerate(gradients) if gradient is None]
        if self._streams:
            self._follow_streams(gradients)
        share, weight = cast("float", weights.share), cast("float", weights.weight)
        if isinstance(share, torch.Tensor) or share != 0.0:
            for index in absent:
                self._pieces[index].zero_()
            self._copy_in(gradients, self.channel.factor(share))
        self.channel.start(share, weight, absent)
        self._num_absent = len(absent)

    def _follow_streams(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Have the current stream wait for the other ones that gradients were computed on."""
        own = current_stream(self.channel.body.device)
        others = {stream for stream in self._streams if stream != own}
        if not others:
            return
        for stream in others:
            own.wait_stream(stream)
        for gradient in gradients:
            if gradient is not None:
                # Its memory belongs to the stream it was computed on, which could use it again too early.
                gradient.record_stream(own)

    def _copy_in(self, gradients: Sequence[torch.Tensor | None], factor: Amount) -> None:
        if (
            not isinstance(factor, torch.Tensor)
            and self._is_coarse
            and isinstance(self.channel, TakesOwnPart)
            and not self._is_split
            and _is_wide(self._flat)
        ):
            self.channel.contribute(self._copy_in_for_others(gradients, factor, self.channel.own))
            return
        if self._is_coarse:
            # One pass over memory, at the price of a call per gradient.
            for body, gradient in zip(self._bodies, gradients, strict=True):
                if gradient is not None:
                    torch.mul(gradient, factor, out=body)
            return
        places: list[torch.Tensor] = []
        given: list[torch.Tensor] = []
        for place, gradient in zip(self._pieces, gradients, strict=True):
            if gradient is not None and gradient is not place:
                places.append(place)
                given.append(gradient)
        if places:
            foreach_copy_(places, given)
        torch.mul(self._flat, factor, out=self.channel.body)

    def _copy_in_for_others(
        self, gradients: Sequence[torch.Tensor | None], factor: float, own: slice
    ) -> list[tuple[int, torch.Tensor, float]]:
        """Copy what other ranks read; return pieces of gradients for the part that only this rank reads."""
        body = self.channel.body
        pieces = []
        for place, gradient in zip(self._bodies, gradients, strict=True):
            start = place.storage_offset() - body.storage_offset()
            end = start + place.numel()
            low, high = min(max(own.start, start), end), max(min(own.stop, end), start)
            if gradient is None or gradient.stride() != place.stride() or low >= high:
                if gradient is not None:
                    torch.mul(gradient, factor, out=place)
                if low < high:
                    pieces.append((low, body[low:high], 1.0))
                continue
            flat = gradient.as_strided((place.numel(),), (1,))
            torch.mul(flat[: low - start], factor, out=body[start:low])
            torch.mul(flat[high - start :], factor, out=body[high:end])
            pieces.append((low, flat[low - start : high - start], factor))
        return pieces

    def take_back(self) -> None:
        """Wait for the means, and make each parameter's gradient a view of them, but for those that no rank had."""
        self.channel.finish()
        if self.channel.result is not self._result:
            self._result = self.channel.result
            self._results = _views(self._result, self.parameters)
        if not self._num_absent and not self._is_split:
            for parameter, result in zip(self.parameters, self._results, strict=True):
                parameter.grad = result
            self._streams.clear()
            return
        for index, (parameter, result) in enumerate(zip(self.parameters, self._results, strict=True)):
            # The flag is only read if this rank had no gradient itself: reading one element is slow.
            if not self._num_absent or parameter.grad is not None or self.channel.is_flag_set(index):
                parameter.grad = gradient_of(parameter, result) if self._is_split else result
        self._streams.clear()

    def left_out(self) -> dict[int, torch.Tensor]:
        """Return the part of each gradient that compression left out so far, by number of the parameter."""
        if not isinstance(self.channel, HasErrorFeedback):
            return {}
        return dict(zip(self.numbers, self.channel.feedback.pieces(), strict=True))


def _is_wide(body: torch.Tensor) -> bool:
    """Return whether numbers are summed as they are: half-precision ones are summed in float32 and rounded once."""
    return body.dtype not in (torch.bfloat16, torch.float16)


def own_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of this rank's part of a parameter."""
    gradient = parameter.grad
    if gradient is None or own_part(parameter) is parameter:
        return gradient
    placements = cast("Any", parameter).placements
    if cast("Any", gradient).placements != placements:
        gradient = cast("Any", gradient).redistribute(placements=placements)
    return own_part(gradient)


def gradient_of(parameter: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter from that of this rank's part."""
    if own_part(parameter) is parameter:
        return own
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - most models have none, and it takes long to import

    spread = cast("DTensor", parameter)
    return DTensor.from_local(
        own, spread.device_mesh, spread.placements, run_check=False, shape=spread.shape, stride=spread.stride()
    )


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


# -- which parameters belong together: lists of their numbers --------------------------------------------


def plan(
    parameters: Sequence[torch.Tensor], order: Sequence[int], first_bytes: int, limit_bytes: int
) -> list[list[int]]:
    """Return buckets of parameter numbers, filled in ``order``.

    Parameters of one dtype and device share buckets. A bucket closes when it reaches its limit; the first
    closes early, so that reducing starts early.

    Args:
        parameters: all of them.
        order: their numbers, in the order in which their gradients arrive.
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
