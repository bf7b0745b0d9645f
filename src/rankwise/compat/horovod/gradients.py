# SPDX-License-Identifier: Apache-2.0
"""The gradients of one wrapped optimizer: counted while backward runs, combined over ranks in ``reduce``.

Means and sums of dense gradients are reduced in buckets, all others as operations of their own, by name.
"""

from __future__ import annotations

import weakref
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rankwise.comm.collectives import exchange_of, gather_json
from rankwise.compat.horovod import queue
from rankwise.compat.horovod.api import synchronize
from rankwise.compat.horovod.collectives import sparse_allreduce_async
from rankwise.compat.horovod.compression import Compression
from rankwise.compat.horovod.reducing import allreduce_async_
from rankwise.compat.horovod.request import Average, Sum
from rankwise.compress.methods import Narrow
from rankwise.errors import ConfigurationError
from rankwise.replicate.bucket import Weights
from rankwise.replicate.gradient_buckets import GradientBuckets, call_when_accumulated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import BucketChannel
    from rankwise.compat.horovod.process_sets import ProcessSet

_numbers: Counter[int] = Counter()
"""The number of optimizers of each process set so far; equal on all ranks, which wrap them in the same order."""
_collected: set[str] = set()
"""Names of deleted optimizers whose channels are kept, since this rank uses them after it has joined."""


class GradientReduction(NamedTuple):
    """How gradients are combined."""

    op: Any
    compression: Any
    predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet

    @property
    def takes_buckets(self) -> bool:
        """Whether dense gradients can be reduced in buckets."""
        return self.op in {Average, Sum} and self.compression in {Compression.none, Compression.fp16}

    def weights(self, num_ranks: int) -> Weights:
        """Return the weight of every rank's gradients: a sum is a mean whose weights add up to one."""
        share = 1.0 / self.predivide_factor
        return Weights(share, share if self.op == Average else 1.0 / num_ranks)


class GradientOrderError(ConfigurationError, AssertionError):
    """Backward, ``step`` and ``zero_grad`` were called in an order that would lose gradients."""


class PassCounter:
    """Counts the gradients of some parameters; calls ``complete(number)`` after ``num_passes``, while backward runs."""

    def __init__(self, num_passes: int, complete: Callable[[int], None]) -> None:
        self.names: list[str] = []
        self.parameters: list[nn.Parameter] = []
        self._num_passes = num_passes
        self._expected: list[int] = []
        """For each gradient, the number of passes of this step after which it is complete."""
        self._left: list[int] = []
        self._complete = complete
        self.is_pending = False
        """Whether there are gradients that no step has used."""

    def follow(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        """Count the gradients of more parameters."""
        for name, parameter in zip(names, parameters, strict=True):
            call_when_accumulated(parameter, self, PassCounter._count, len(self.parameters))
            self.names.append(name)
            self.parameters.append(parameter)
            self._expected.append(self._num_passes)
            self._left.append(self._num_passes)

    def expect(self, num_passes: int) -> None:
        """Expect ``num_passes`` before each step, from now on; complete gradients of this step remain complete."""
        self._num_passes = num_passes
        for number, left in enumerate(self._left):
            if left > 0:
                self._expected[number] += num_passes - left
                self._left[number] = num_passes

    def start_over(self) -> None:
        """Begin a step."""
        self._expected = [self._num_passes] * len(self.parameters)
        self._left = self._expected.copy()
        self.is_pending = False

    def _count(self, number: int) -> None:
        left = self._left[number]
        if left <= 0:
            expected = self._expected[number]
            late = f", complete before set_backward_passes_per_step({self._num_passes})" * (expected < self._num_passes)
            raise GradientOrderError(
                "backward() ran more than backward_passes_per_step times before step().",
                evidence=f"{self.names[number]}: pass {expected + 1} of {expected}{late}",
                do="set backward_passes_per_step to the number of backward passes between two steps, before the first",
            )
        gradient = self.parameters[number].grad
        if gradient is not None and gradient.requires_grad:
            raise GradientOrderError(
                "Gradients that backward(create_graph=True) leaves in parameters of a DistributedOptimizer cannot be "
                "differentiated again.",
                do="take the inner gradient with torch.autograd.grad(..., create_graph=True), then call backward once",
            )
        self.is_pending = True
        self._left[number] = left - 1
        if left == 1:
            self._complete(number)


class Gradients:
    """Combines the gradients of one wrapped optimizer, as long as it exists."""

    def __init__(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], reduction: GradientReduction, num_passes: int
    ) -> None:
        self.passes = PassCounter(num_passes, self._complete)
        self.passes.follow(names, parameters)
        self._reduction = reduction
        self._num_in_buckets = len(parameters)
        """The buckets hold these parameters; those that are added later are reduced by name."""
        self._arrived: list[int] = []
        self._was_sparse: set[int] = set()
        self._sparse: set[int] = set()
        """Parameters that had a sparse gradient on any rank in the first step."""
        self._buckets: GradientBuckets | None = None
        self._weights = Weights(1.0, 1.0)
        self._is_open = not reduction.takes_buckets
        self._under_way: dict[int, tuple[Any, Any]] = {}
        self._set_id = reduction.process_set.process_set_id or 0
        self._what = f"DistributedOptimizer.{self._set_id}.{_numbers[self._set_id]}"
        _numbers[self._set_id] += 1
        followed: weakref.ref[Gradients] = weakref.ref(self)
        queue.register(f"{self._what}.open", lambda: _open_as_joined(followed))
        weakref.finalize(self, _collected.add, self._what)

    def forget(self) -> None:
        """Discard gradients that were computed or are being sent."""
        self._start_over()
        # This rank may have sent more than others: nothing more can be sent on these channels.
        self._buckets = None
        self._is_open = not self._reduction.takes_buckets

    def _start_over(self) -> None:
        self.passes.start_over()
        self._arrived.clear()
        self._was_sparse.clear()
        self._under_way.clear()

    def _complete(self, number: int) -> None:
        """Send a complete gradient, while backward runs."""
        if not self._is_open and number < self._num_in_buckets:
            self._arrived.append(number)
        elif self._buckets is not None and self._buckets.carries(number):
            self._make_dense(number)
            if self._buckets.note_arrival(number):
                self._buckets.send_full(self._weights)

    # -- before a step -----------------------------------------------------------------------------

    def reduce(self) -> None:
        """Combine all gradients over the ranks of the process set. A missing gradient counts as zero.

        Called by: every rank of the process set, once per step.
        """
        try:
            if not self._is_open:
                queue.announce(f"{self._what}.open", self._open, self._set_id)
            for number in range(len(self.passes.parameters)):
                if self._buckets is None or not self._buckets.carries(number):
                    self._start_by_name(number)
            if self._buckets is not None:
                queue.announce(self._what, self._carry, self._set_id)
            for number, (handle, context) in self._under_way.items():
                self._take_back(number, handle, context)
        except BaseException:
            _withdraw(handle for handle, _ in self._under_way.values())
            self.forget()
            raise
        self._start_over()

    def _open(self) -> None:
        """Lay out the buckets, once every rank knows which gradients there are.

        Called by: every rank of the process set.
        """
        reduction = self._reduction
        sparse = [
            number
            for number, parameter in enumerate(self.passes.parameters[: self._num_in_buckets])
            if parameter.grad is not None and parameter.grad.is_sparse and not reduction.sparse_as_dense
        ]
        group = reduction.process_set.group
        collected = [name for name in sorted(_collected) if name.startswith(f"DistributedOptimizer.{self._set_id}.")]
        reported = gather_json([sparse, self._arrived, collected], what=f"{self._what}.open", group=group)
        _free_channels(set(collected).intersection(*(names for _, _, names in reported)))
        self._sparse = {number for other, _, _ in reported for number in other}
        arrived: list[int] = next((numbers for _, numbers, _ in reported if numbers), [])
        every = dict.fromkeys([*arrived, *range(self._num_in_buckets)])
        order = [number for number in every if number not in self._sparse]
        exchange = exchange_of(group)
        self._is_open = True
        if exchange is None or not order:
            return
        compress = Narrow("fp16") if reduction.compression is Compression.fp16 else None
        what = f"gradients of {self._what}"
        self._buckets = GradientBuckets(
            self.passes.parameters, order, exchange.dup(), what, compress, names=self.passes.names
        )
        self._weights = reduction.weights(exchange.world_size)
        # The queue keeps the channels: a rank may have joined and deleted its optimizer while others step.
        queue.register(self._what, partial(_stand_in, self._buckets.channels, float(self._weights.weight)))

    def _carry(self) -> None:
        buckets = self._buckets
        if buckets is None:
            return
        for number in range(self._num_in_buckets):
            if buckets.carries(number):
                self._make_dense(number)
                parameter = self.passes.parameters[number]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        buckets.send_rest(self._weights)
        buckets.take_back()
        for number in self._was_sparse:
            gradient = self.passes.parameters[number].grad
            if gradient is not None:
                self.passes.parameters[number].grad = gradient.to_sparse()
        self._was_sparse.clear()

    def _make_dense(self, number: int) -> None:
        parameter = self.passes.parameters[number]
        gradient = parameter.grad
        if gradient is None or not gradient.is_sparse:
            return
        if not self._reduction.sparse_as_dense:
            raise ConfigurationError(
                f"The gradient of {self.passes.names[number]} is sparse but was dense in the first step.",
                do="pass sparse_as_dense=True to DistributedOptimizer",
            )
        parameter.grad = gradient.to_dense()
        self._was_sparse.add(number)

    # -- by name -----------------------------------------------------------------------------------

    def _start_by_name(self, number: int) -> None:
        parameter, name, reduction = self.passes.parameters[number], self.passes.names[number], self._reduction
        gradient = parameter.grad
        if gradient is None:
            parameter.grad = gradient = (
                _no_rows(parameter) if number in self._sparse else torch.zeros_like(parameter, requires_grad=False)
            )
        if gradient.is_sparse and not reduction.sparse_as_dense:
            handle = sparse_allreduce_async(gradient, name=name, op=reduction.op, process_set=reduction.process_set)
            self._under_way[number] = (handle, None)
            return
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        compressed, context = reduction.compression.compress(dense.contiguous())
        factor = reduction.predivide_factor if reduction.op == Average else 1.0
        handle = allreduce_async_(
            compressed,
            name=name,
            op=reduction.op,
            prescale_factor=1.0 / factor,
            postscale_factor=factor,
            process_set=reduction.process_set,
        )
        self._under_way[number] = (handle, context)

    @torch.no_grad()
    def _take_back(self, number: int, handle: Any, context: Any) -> None:
        parameter, reduction = self.passes.parameters[number], self._reduction
        output: Any = handle() if callable(handle) else synchronize(handle)
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            if reduction.sparse_as_dense:
                output = reduction.compression.decompress(output, context)
            parameter.grad = output if output.is_sparse else output.to_sparse()
        elif gradient is not None:
            gradient.copy_(reduction.compression.decompress(output, context))


def _no_rows(parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient like an embedding's, with no rows."""
    indices = torch.zeros(1, 0, dtype=torch.int64, device=parameter.device)
    values = parameter.detach().new_zeros(0, *parameter.shape[1:])
    return torch.sparse_coo_tensor(indices, values, parameter.shape, is_coalesced=True)


def _stand_in(channels: Sequence[BucketChannel], weight: float) -> None:
    """Take part in a step of the other ranks, with weight zero."""
    for channel in channels:
        channel.claim()
        channel.start(0.0, weight, ())
    for channel in channels:
        channel.finish()


def _withdraw(handles: Iterable[Any]) -> None:
    """Withdraw operations that other ranks may not have called: the next step has some of the same names."""
    known = queue.current_queue()
    for handle in handles:
        operation = None if callable(handle) else known.handles.pop(handle, None)
        if operation is not None:
            known.withdraw(operation)


def _free_channels(names: set[str]) -> None:
    """Drop the channels of optimizers that every rank has deleted."""
    _collected.difference_update(names)
    as_joined = queue.current_queue().as_joined
    for name in names:
        as_joined.pop(name, None)
        as_joined.pop(f"{name}.open", None)


def _open_as_joined(followed: weakref.ref[Gradients]) -> None:
    gradients = followed()
    if gradients is None:
        raise ConfigurationError(
            "Other ranks take the first step of a DistributedOptimizer that this rank has deleted after calling "
            "join().",
            do="keep a reference to the optimizer until join() returns",
        )
    gradients._open()  # noqa: SLF001 - of this module
