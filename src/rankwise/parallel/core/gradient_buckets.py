# SPDX-License-Identifier: Apache-2.0
"""Gradients of many parameters, reduced over ranks in buckets; each is sent once it and those before it are full.

The one engine for replicate, pipeline, Horovod's DistributedOptimizer and MegEngine's GradManager. Each of them
decides when a gradient is complete, and what it counts: its :class:`Weights`.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from rankwise.comm.backends.protocol import ChannelSize, TakesOwnPart
from rankwise.errors import ConfigurationError
from rankwise.parallel.compress.error_feedback import HasErrorFeedback
from rankwise.parallel.compress.open_channels import open_channels
from rankwise.torch_private import foreach
from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.utils.hooks import RemovableHandle

    from rankwise.comm.backends.protocol import BucketChannel, Exchange
    from rankwise.parallel.compress.methods import Method

T = TypeVar("T")

FIRST_BUCKET_BYTES = 2**20
COARSE_BYTES = 2**16
"""Mean size of a gradient above which memory traffic costs more than calls."""


def call_when_accumulated(
    parameter: torch.Tensor, owner: T, arrived: Callable[[T, int], None], number: int
) -> RemovableHandle:
    """Call ``arrived(owner, number)`` when a backward has added to ``parameter.grad``, as long as ``owner`` lives."""
    # The parameter holds the hook: a hook that held the owner would never release the model's memory.
    owner_ref = weakref.ref(owner)

    def hook(_: torch.Tensor) -> None:
        alive = owner_ref()
        if alive is not None:
            arrived(alive, number)

    return parameter.register_post_accumulate_grad_hook(hook)


@dataclass(frozen=True, slots=True)
class Weights:
    """What one rank's gradients count: each becomes ``sum_r share_r g_r / sum_r weight_r``.

    For the mean over samples both are this rank's number of samples, for the mean over n ranks both are 1, and for
    their sum a share of 1 goes with a weight of 1/n.
    """

    share: float
    """The factor for this rank's gradients; with 0 nothing of them counts, not even a NaN."""
    weight: float
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

    def agree(self, group: Exchange, own_weight: float, what: str) -> None:
        """Make the mean weight of the ranks' step the unit of the next send.

        Called by: every rank of ``group``.

        Args:
            group: the ranks.
            own_weight: of this rank's step.
            what: the name of the values that are sent.
        """
        own = torch.tensor([own_weight], dtype=torch.float64)
        total = group.all_reduce(own, what=f"weights of {what}").item()
        if total > 0:
            self.scale = 1.0 / power_near(total / group.world_size)
            self.is_open = False

    def adjust(self, mean: float) -> None:
        """Use the mean weight of the ranks' last step, in units, for the next steps."""
        self.size = power_near(self.size * mean)
        self.scale = 1.0


def power_near(weight: float) -> float:
    """Return the power of two nearest to a weight."""
    # Multiplying by a power of two rounds nothing. So a step after a resume, whose unit is 1, or a float16 step, which
    # has its own, computes the same bits as in the undisturbed run.
    return 2.0 ** round(math.log2(weight))


class GradientBuckets:
    """Buckets that are sent in one order on all ranks, and used again in every step.

    A step is: :meth:`note_arrival` for each complete gradient, and :meth:`send_full` if it returns true;
    :meth:`send_rest`; :meth:`take_back`.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        order: Iterable[int],
        exchange: Exchange,
        what: str,
        compress: Method | None = None,
        *,
        names: Sequence[str] | None = None,
        replaced: GradientBuckets | None = None,
    ) -> None:
        """Open a channel per bucket.

        Called by: every rank of ``exchange``, with parameters of the same shapes in the same order.

        Args:
            parameters: all of them.
            order: numbers of those whose gradients are reduced, at least one, in the expected order of arrival.
            exchange: the ranks.
            what: the name of the gradients, for errors.
            compress: how gradients are compressed for sending.
            names: of all parameters, for errors; default: their numbers and shapes.
            replaced: the buckets of earlier steps, whose error feedback is taken over.

        Raises:
            CollectiveMismatch: the shapes are not the same on every rank.
        """
        numbers = list(order)
        members = plan(parameters, numbers, FIRST_BUCKET_BYTES, exchange.channel_bytes(parameters[numbers[0]].device))
        shapes = [[own_part(parameters[number]).shape for number in inside] for inside in members]
        sizes = []
        for inside, of_members in zip(members, shapes, strict=True):
            first = parameters[inside[0]]
            num_elements = sum(shape.numel() for shape in of_members)
            sizes.append(ChannelSize(num_elements, len(inside), first.dtype, first.device))
        channels = open_channels(compress, exchange, sizes, shapes, what)
        self._names = names or [f"{number} of shape {list(one.shape)}" for number, one in enumerate(parameters)]
        scratch = Scratch()
        self._buckets = [
            Bucket(inside, parameters, channel, scratch) for inside, channel in zip(members, channels, strict=True)
        ]
        self._bucket_of = {number: bucket for bucket in self._buckets for number in bucket.numbers}
        self._num_sent = 0
        self._is_first_step = True
        self.first_arrivals: list[int] = []
        """Numbers of the parameters in the order in which their gradients arrived in the first step."""
        if replaced is not None:
            _carry_over(replaced._buckets, self._buckets)  # noqa: SLF001 - of this class

    @property
    def channels(self) -> list[BucketChannel]:
        """The channels of the buckets, in the order in which they are sent."""
        return [bucket.channel for bucket in self._buckets]

    def carries(self, number: int) -> bool:
        """Return whether the gradient of a parameter is reduced here."""
        return number in self._bucket_of

    def note_arrival(self, number: int) -> bool:
        """Note that a gradient is complete; return whether a bucket can be sent now.

        Raises:
            ConfigurationError: it was complete before in this step, or it is sparse.
        """
        bucket = self._bucket_of[number]
        bucket.num_missing = missing = bucket.num_missing - 1
        if self._is_first_step:
            self._note_first_arrival(number)
        if missing < 0:
            raise ConfigurationError(
                f"Parameter {self._names[number]} received another gradient after its gradient was sent to the other "
                "ranks.",
                evidence="a part of the model ran backward several times within one backward()",
                do="use torch.utils.checkpoint with use_reentrant=False",
            )
        return missing == 0 and self._can_send_next()

    def _note_first_arrival(self, number: int) -> None:
        bucket = self._bucket_of[number]
        gradient = bucket.parameters[bucket.numbers.index(number)].grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise ConfigurationError(
                f"Parameter {self._names[number]} has a sparse gradient.", do="create the layer with sparse=False"
            )
        self.first_arrivals.append(number)

    def _can_send_next(self) -> bool:
        if self._num_sent == len(self._buckets):
            return False
        bucket = self._buckets[self._num_sent]
        # Waiting here could deadlock: another rank may wait for this one elsewhere in its backward.
        return bucket.num_missing <= 0 and bucket.channel.can_claim()

    def send_full(self, weights: Weights) -> None:
        """Send the next buckets, as long as they are full and need not wait."""
        while self._can_send_next():
            self._send_next(weights)

    def send_rest(self, weights: Weights) -> None:
        """Send the other buckets, full or not. A parameter without a gradient counts as zero.

        Called by: every rank of the exchange, once per step.
        """
        while self._num_sent < len(self._buckets):
            self._send_next(weights)

    def _send_next(self, weights: Weights) -> None:
        bucket = self._buckets[self._num_sent]
        first = bucket.parameters[0].grad
        if first is not None and first.requires_grad:
            raise ConfigurationError(
                "backward(create_graph=True) left gradients that are reduced over ranks, and cannot be differentiated "
                "again.",
                do="take the inner gradient with torch.autograd.grad(..., create_graph=True), then call backward once",
            )
        bucket.send(weights)
        self._num_sent += 1

    def take_back(self) -> None:
        """Wait for the results, which become the gradients. Ends the step.

        A parameter that no rank had a gradient for keeps ``grad=None``.
        """
        for bucket in self._buckets:
            bucket.take_back()
        self._num_sent = 0
        self._is_first_step = False

    def total(self) -> float:
        """Return the sum of all ranks' weights in the latest step, after :meth:`take_back`."""
        return self._buckets[0].channel.total()

    def start_over(self) -> None:
        """Forget a step that an error interrupted: nothing has arrived."""
        self._num_sent = 0
        for bucket in self._buckets:
            bucket.start_over()


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
    """Gradients that are sent together on a channel, each a view into it."""

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
        self.num_missing = len(self.parameters)
        """Gradients that are not complete yet; less than 0 if one was completed twice."""
        self._num_absent = 0

    def start_over(self) -> None:
        """Begin a step: no gradient has arrived."""
        self.num_missing = len(self.parameters)

    @torch.no_grad()
    def send(self, weights: Weights) -> None:
        """Copy the gradients into the channel and start it. A parameter without a gradient counts as zero."""
        self.channel.claim()
        gradients = [parameter.grad for parameter in self.parameters]
        if self._is_split:
            gradients = [own_gradient(parameter) for parameter in self.parameters]
        absent = [index for index, gradient in enumerate(gradients) if gradient is None]
        if weights.share != 0.0:
            for index in absent:
                self._pieces[index].zero_()
            self._copy_in(gradients, self.channel.factor(weights.share))
        self.channel.start(weights.share, weights.weight, absent)
        self._num_absent = len(absent)

    def _copy_in(self, gradients: Sequence[torch.Tensor | None], factor: float) -> None:
        if self._is_coarse and isinstance(self.channel, TakesOwnPart) and not self._is_split and _is_wide(self._flat):
            self.channel.contribute(self._copy_in_for_others(gradients, factor, self.channel.own))
            return
        if self._is_coarse:
            # One pass over memory, at the price of a call per gradient.
            for body, gradient in zip(self._bodies, gradients, strict=True):
                if gradient is not None:
                    torch.mul(gradient, factor, out=body)
            return
        pairs = [
            (place, gradient)
            for place, gradient in zip(self._pieces, gradients, strict=True)
            if gradient is not None and gradient is not place
        ]
        if pairs:
            foreach.copy_([place for place, _ in pairs], [gradient for _, gradient in pairs])
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
        for index, (parameter, result) in enumerate(zip(self.parameters, self._results, strict=True)):
            # The flag is only read if this rank had no gradient itself: reading one element is slow.
            if not self._num_absent or parameter.grad is not None or self.channel.is_flag_set(index):
                parameter.grad = gradient_of(parameter, result) if self._is_split else result
        self.start_over()

    def left_out(self) -> dict[int, torch.Tensor]:
        """Return the part of each gradient that compression left out so far, by number of the parameter."""
        if not isinstance(self.channel, HasErrorFeedback):
            return {}
        return dict(zip(self.numbers, self.channel.feedback.pieces(), strict=True))


def _is_wide(body: torch.Tensor) -> bool:
    """Return whether numbers are summed as they are: half-precision ones are summed in float32 and rounded once."""
    return body.dtype not in (torch.bfloat16, torch.float16)


def _carry_over(old: Iterable[Bucket], new: Iterable[Bucket]) -> None:
    """Have buckets in a new layout remember the parts that the old ones left out, parameter by parameter."""
    kept = {number: piece for bucket in old for number, piece in bucket.left_out().items()}
    for bucket in new:
        for number, piece in bucket.left_out().items():
            if number in kept:
                piece.copy_(kept[number])


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
