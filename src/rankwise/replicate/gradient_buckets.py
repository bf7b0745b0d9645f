# SPDX-License-Identifier: Apache-2.0
"""Gradients of many parameters, reduced over ranks in buckets; each is sent once it and those before it are full.

The one engine for replicate, pipeline, Horovod's DistributedOptimizer and MegEngine's GradManager. Each of them
decides when a gradient is complete, and what it counts: its :class:`Weights`.
"""

from __future__ import annotations

import math
import weakref
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import torch

from rankwise.comm.backends.protocol import ChannelSize
from rankwise.compress.methods import open_channels
from rankwise.errors import ConfigurationError
from rankwise.replicate.bucket import Bucket, Scratch, plan
from rankwise.replicate.sparse_gradients import SparseGradients
from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from torch.utils.hooks import RemovableHandle

    from rankwise.comm.backends.protocol import Amount, BucketChannel, Exchange
    from rankwise.compress.methods import Method
    from rankwise.replicate.bucket import Weights

T = TypeVar("T")

FIRST_BUCKET_BYTES = 2**20


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


class GradientBuckets:
    """Buckets that are sent in one order on all ranks, and used again in every step.

    A step is: :meth:`note_arrival` for each complete gradient, and :meth:`send_full` if it returns true;
    :meth:`send_rest`; :meth:`take_back`. Its many fields are the buckets, and how far the step under way has come.
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
        sparse: Container[int] = (),
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
            sparse: numbers of the parameters whose gradients are sparse; they are sent when backward has ended.

        Raises:
            CollectiveMismatch: the shapes are not the same on every rank.
        """
        order = list(order)
        numbers = [number for number in order if number not in sparse]
        in_rows = sorted(set(order).difference(numbers))
        if not numbers:
            # The channel of a bucket adds the weights up.
            numbers, parameters = [len(parameters)], [*parameters, parameters[order[0]].new_zeros(1)]
        members = plan(parameters, numbers, FIRST_BUCKET_BYTES, exchange.channel_bytes(parameters[numbers[0]].device))
        shapes = [[own_part(parameters[number]).shape for number in inside] for inside in members]
        sizes = []
        for inside, of_members in zip(members, shapes, strict=True):
            first = parameters[inside[0]]
            num_elements = sum(shape.numel() for shape in of_members)
            sizes.append(ChannelSize(num_elements, len(inside), first.dtype, first.device))
        channels = open_channels(compress, exchange, sizes, shapes, what)
        self._names = names or [f"{number} of shape {list(one.shape)}" for number, one in enumerate(parameters)]
        self._parameters = parameters
        scratch = Scratch()
        self._buckets = [
            Bucket(inside, parameters, channel, scratch) for inside, channel in zip(members, channels, strict=True)
        ]
        self._sparse = SparseGradients([parameters[number] for number in in_rows], exchange, what) if in_rows else None
        self._place_of = {number: place for place, bucket in enumerate(self._buckets) for number in bucket.numbers}
        """By number of a parameter, which bucket it is in; sparse ones are after the last bucket."""
        self._place_of.update(dict.fromkeys(in_rows, len(self._buckets)))
        self._num_members = [*(len(bucket.numbers) for bucket in self._buckets), math.inf]
        self._num_missing = self._num_members.copy()
        """By bucket, gradients that are not complete yet; less than 0 if one was completed twice."""
        self._follows_streams = any(bucket.follows_streams for bucket in self._buckets)
        self._weights: Weights | None = None
        self.num_unsent = len(self._buckets) + bool(in_rows)
        """How many buckets are left for :meth:`send_rest` in this step; sparse gradients count as one."""
        self._num_sent = 0
        self._is_first_step = True
        self._turns: list[float] | None = None
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
        return number in self._place_of

    def note_arrival(self, number: int) -> bool:
        """Note that a gradient is complete; return whether a bucket can be sent now.

        Raises:
            ConfigurationError: it was complete before in this step, or it is sparse.
        """
        place = self._place_of[number]
        self._num_missing[place] = missing = self._num_missing[place] - 1
        if self._follows_streams and place < len(self._buckets):
            self._buckets[place].note_stream()
        if self._is_first_step and place < len(self._buckets):
            self._note_first_arrival(number, self._buckets[place])
        if missing < 0:
            raise ConfigurationError(
                f"Parameter {self._names[number]} received another gradient after its gradient was sent to the other "
                "ranks.",
                evidence=self._why_late(),
                do="use torch.utils.checkpoint with use_reentrant=False",
            )
        return missing == 0 and self._turns is None and self._can_send_next()

    def _why_late(self) -> str:
        if self._turns is None:
            return "a part of the model ran backward several times within one backward()"
        return (
            "a part of the model ran backward several times within one backward(), or later than in the first step, "
            "whose order of buckets and BatchNorm statistics every step on this device repeats"
        )

    def send_by_turns(self, turns: Mapping[int, int]) -> None:
        """Send buckets at fixed points of backward only, full or not.

        Args:
            turns: numbers of parameters, and before which of the other collectives in backward their gradients are
                complete. The rest are sent by :meth:`send_rest`.
        """
        members = [max(turns.get(number, math.inf) for number in bucket.numbers) for bucket in self._buckets]
        self._turns = list(accumulate(members, max))

    def send_before(self, collective: int, weights: Callable[[], Weights]) -> None:
        """Send the buckets whose turn is before that one of the other collectives in this backward."""
        while self._turns is not None and self._num_sent < len(self._buckets):
            if self._turns[self._num_sent] > collective:
                return
            self._send_next(weights())
            # A gradient that arrives from now on in this step is one too many.
            self._num_missing[self._num_sent - 1] = 0

    def _note_first_arrival(self, number: int, bucket: Bucket) -> None:
        gradient = bucket.parameters[bucket.numbers.index(number)].grad
        if gradient is not None and gradient.layout is not torch.strided:
            raise ConfigurationError(
                f"Parameter {self._names[number]} has a sparse gradient.",
                do="compute it by a layer that is known when the model is distributed, as torch.nn.Embedding(..., "
                "sparse=True) or EmbeddingBag in rankwise.replicate(); or pass sparse=False",
            )
        self.first_arrivals.append(number)

    def _can_send_next(self) -> bool:
        if self._num_sent == len(self._buckets):
            return False
        # Waiting here could deadlock: another rank may wait for this one elsewhere in its backward.
        return self._num_missing[self._num_sent] <= 0 and self._buckets[self._num_sent].channel.can_claim()

    def send_full(self, weights: Weights) -> None:
        """Send the next bucket, and those after it as long as they are full and need not wait.

        Called after :meth:`note_arrival` has returned true.
        """
        self._send_next(weights, is_claimable=True)
        while self._num_sent < len(self._buckets) and self._can_send_next():
            self._send_next(weights, is_claimable=True)

    def send_rest(self, weights: Weights) -> None:
        """Send the other buckets, full or not. A parameter without a gradient counts as zero.

        Called by: every rank of the exchange, once per step.
        """
        while self._num_sent < len(self._buckets):
            self._send_next(weights)
        self._weights = weights

    def _send_next(self, weights: Weights, *, is_claimable: bool = False) -> None:
        """Send the next bucket; ``is_claimable``: its channel has been asked, and need not be waited for."""
        bucket = self._buckets[self._num_sent]
        first = bucket.parameters[0].grad
        if first is not None and first.requires_grad:
            raise ConfigurationError(
                "backward(create_graph=True) left gradients that are reduced over ranks, and cannot be differentiated "
                "again.",
                do="take the inner gradient with torch.autograd.grad(..., create_graph=True), then call backward once",
            )
        try:
            if not is_claimable:
                bucket.channel.claim()
            bucket.send(weights)
        except RuntimeError:
            self._check_shapes(bucket)
            raise
        self._num_sent += 1
        self.num_unsent -= 1

    def _check_shapes(self, bucket: Bucket) -> None:
        """Raise if a parameter has changed its shape since the buckets were laid out."""
        for number, before in zip(bucket.numbers, bucket.shapes(), strict=True):
            now = own_part(self._parameters[number]).shape
            if now != before:
                raise ConfigurationError(
                    f"Parameter {self._names[number]} has changed its shape since the model was distributed.",
                    evidence=f"it was {list(before)} and is {list(now)}",
                    do="distribute the model again after such a change, as by rankwise.replicate(model), and create "
                    "the optimizer after that",
                ) from None

    def take_back(self) -> Amount:
        """Wait for the results, which become the gradients; return the sum of all ranks' weights. Ends the step.

        A parameter that no rank had a gradient for keeps ``grad=None``.
        """
        for bucket in self._buckets:
            try:
                bucket.take_back()
            except RuntimeError:
                self._check_shapes(bucket)
                raise
        total = self._buckets[0].channel.total()
        if self._sparse is not None and self._weights is not None:
            self._sparse.reduce(self._weights, total)
        self._begin_step()
        self._is_first_step = False
        return total

    def start_over(self) -> None:
        """Forget a step that an error interrupted: nothing has arrived."""
        self._begin_step()
        for bucket in self._buckets:
            bucket.forget_streams()

    def _begin_step(self) -> None:
        self._num_missing[:] = self._num_members
        self._num_sent = 0
        self.num_unsent = len(self._buckets) + (self._sparse is not None)


class SendOrder:
    """When the buckets of one model are sent, among the collectives of other exchanges, in the order of all ranks."""

    def __init__(self, *, needs_one: bool) -> None:
        """Start; ``needs_one``: all ranks must issue the collectives of several exchanges in one order, as on NCCL."""
        self.needs_one = self.is_held = needs_one
        """The second: whether buckets wait for the end of backward."""
        self.is_known = False
        """Whether the buckets are laid out in the order in which gradients arrive."""
        self._is_alone = True
        """Whether each backward so far was of no other model."""
        self.num_others = 0
        """How many collectives of other exchanges this backward has issued."""
        self.turns: dict[int, int] = {}
        """How many they were when each gradient arrived in the first step."""

    def note_turn(self, number: int) -> None:
        """Note that a gradient has arrived in the first step."""
        self.turns[number] = self.num_others

    def note_other(self) -> None:
        """Note a collective of another exchange."""
        self.num_others += 1

    def forget_others(self) -> None:
        """Note that a backward has ended."""
        self.num_others = 0

    def note_other_models(self) -> None:
        """Note that a backward was of other models too."""
        self._is_alone, self.is_held = False, self.needs_one

    def note_known(self) -> None:
        """Note that the first step has ended, whose order of gradients is that of the buckets now."""
        self.is_known, self.is_held = True, self.needs_one and not self._is_alone

    def start_over(self) -> None:
        """Note that buckets were laid out for other parameters."""
        self.is_known, self.is_held = False, self.needs_one
        self.turns.clear()


def _carry_over(old: Iterable[Bucket], new: Iterable[Bucket]) -> None:
    """Have buckets in a new layout remember the parts that the old ones left out, parameter by parameter."""
    kept = {number: piece for bucket in old for number, piece in bucket.left_out().items()}
    for bucket in new:
        for number, piece in bucket.left_out().items():
            if number in kept:
                piece.copy_(kept[number])
