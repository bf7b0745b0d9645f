# SPDX-License-Identifier: Apache-2.0
"""Exact gradients of a sharded model: torch reduces them, and averages ranks with equal weights.

What each rank hands to the reduction is multiplied by its weight first, where the weights are not equal; so is each
microstep of an accumulation. What no rank used keeps ``grad=None``. Used by shard.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rankwise.errors import ConfigurationError
from rankwise.exchange.protocol import LaneSize
from rankwise.parallel.trained import samples_of, tensors_with_grad
from rankwise.torch_private.autograd import in_backward, run_after_backward
from rankwise.torch_private.compiler import uncompiled
from rankwise.torch_private.fsdp import (
    call_before_reduction,
    forget_gradient,
    groups_of,
    params_of,
    reduce_dtype_of,
    reduce_instead,
    sharded_of,
    whole_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from rankwise.exchange.protocol import Lane
    from rankwise.exchange.torch_group import TorchGroup
    from rankwise.parallel.same_forward import SameForward
    from rankwise.torch_private.fsdp import FSDPParamGroup


class Announced:
    """The weight of one forward call, which every rank tells the others when the call begins."""

    __slots__ = ("amount", "num_carried", "total")

    def __init__(self, amount: float | None, num_carried: int) -> None:
        self.amount = amount
        self.num_carried = num_carried
        """How many microsteps were added up when it was told."""
        self.total: float | None = None
        """The sum over all ranks, when it is known."""


class ShardSync:
    """The gradients of one sharded model, from ``shard`` until the model is gone."""

    strategy = "shard"

    def __init__(self, model: nn.Module, exchange: TorchGroup | None) -> None:
        """Note the blocks of ``model``.

        Args:
            model: sharded already.
            exchange: of its own. torch's: it moves on while this rank calculates, or waits in torch.
        """
        self.given_weight: float | None = None
        self.on_mean: Callable[[float], None] | None = None
        """Called at the end of backward with what the gradients are the mean over, on all ranks together."""
        self._total = 0.0
        """What the gradients of the backward under way will be the mean over."""
        self._model = ref(model)
        self._exchange = exchange
        self._groups = groups_of(model)
        self._places = [(group, index) for group in self._groups for index in range(len(params_of(group)))]
        self._number_of = {id(params_of(group)[index]): i for i, (group, index) in enumerate(self._places)}
        self._weights: Lane | None = None
        self._uses: Lane | None = None
        if exchange is not None:
            cpu = torch.device("cpu")  # the host asks for both, and need not wait for a device
            self._weights, self._uses = exchange.lanes(
                [LaneSize(1, 0, torch.float64, cpu), LaneSize(1, len(self._places), torch.float64, cpu)],
                f"weights of {type(model).__name__}",
            )
        self._is_accumulating = False
        self._under_way: Announced | None = None
        self._latest = Announced(None, 0)
        self._in_backward = False
        self._factor = 1.0
        """What a rank's gradients are multiplied with before they are reduced."""
        self._carried_factor = 1.0
        """The same for those of earlier microsteps."""
        self._unit = 1.0
        """What this rank counts the weights of microsteps in, so that gradients stay about as large as they are."""
        self._amount = 0.0
        self._carried = 0.0
        self._num_carried = 0
        self._earlier: dict[int, torch.Tensor] = {}
        """By number of the parameter, the weighted sum of the gradients of earlier microsteps: [as the whole one]."""
        self._used: set[int] = set()
        self._without_gradient: set[int] = set()
        self._num_synced = 0
        for group in self._groups:
            call_before_reduction(group, self._before_reduction)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of the model, as they are sharded."""
        model = self._model()
        return [] if model is None else list(model.parameters())

    @property
    def is_accumulating(self) -> bool:
        """Whether another microstep follows the one under way."""
        return self._is_accumulating

    @is_accumulating.setter
    def is_accumulating(self, value: bool) -> None:
        self._is_accumulating = value
        model = self._model()
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(not value)

    def is_mid_step(self) -> bool:
        """Whether gradients of some microsteps wait, on every rank, for those of the last."""
        return self._num_carried > 0

    # -- around forward ----------------------------------------------------------------------------

    def before_forward(self, amount: float | None) -> None:
        """Tell the others what the call stands for. Called by: every rank, before a forward that may be trained."""
        self._follow_unfrozen()
        self._latest = Announced(amount, self._num_carried)
        # Said while forward runs, it is known when backward begins.
        if amount is not None and not self._is_accumulating:
            self._announce(self._latest, self._checked(amount))

    def _follow_unfrozen(self) -> None:
        """Have torch's whole parameters need gradients where the sharded ones do by now."""
        for group in self._groups:
            for one in params_of(group):
                whole, requires_grad = whole_of(one), sharded_of(one).requires_grad
                if whole is not None and whole.requires_grad != requires_grad:
                    whole.requires_grad_(requires_grad)

    def after_forward(self, output: object) -> None:
        """Follow what the call returned."""
        announced = self._latest
        for reached in tensors_with_grad(output):
            reached.register_hook(lambda _: self._begin(announced))

    def _announce(self, announced: Announced, amount: float) -> None:
        own = self._carried + amount
        if self._weights is None:
            announced.total = own
            return
        self._learn()
        self._weights.claim()
        self._weights.start(1.0, own, ())
        self._under_way = announced

    def _learn(self) -> None:
        """Wait for the sum that is under way, if one is."""
        if self._under_way is not None and self._weights is not None:
            announced, self._under_way = self._under_way, None
            self._weights.finish()
            announced.total = self._weights.total()

    # -- while backward runs -----------------------------------------------------------------------

    def _begin(self, announced: Announced) -> None:
        """Start a backward. Further calls change nothing."""
        if self._in_backward:
            return
        amount = self._checked(announced.amount if self.given_weight is None else self.given_weight)
        self._in_backward = True
        self._amount = amount
        if self._is_accumulating:
            if not self._num_carried:
                # A power of two, by which dividing rounds nothing.
                self._unit = 2.0 ** round(math.log2(amount)) if amount > 0 else 1.0
            self._factor = amount / self._unit
        else:
            # Every rank comes to the same decision: each was in the same forwards and microsteps.
            is_told = announced.total is not None or announced is self._under_way
            if self.given_weight is not None or announced.num_carried != self._num_carried or not is_told:
                self._announce(announced, amount)
            self._learn()
            self._total = announced.total or 0.0
            self._divide_by(self._total, amount)
            self._without_gradient = {
                number
                for number, (group, index) in enumerate(self._places)
                if sharded_of(params_of(group)[index]).grad is None
            }
        run_after_backward(self._end_last)

    def _divide_by(self, total: float, amount: float) -> None:
        """Have this rank's gradients multiplied so that torch's mean over ranks is the mean over all samples."""
        world_size = 1 if self._exchange is None else self._exchange.world_size
        each = world_size / total if total > 0 else 0.0
        self._carried_factor = self._unit * each
        # Equal weights leave torch's mean as it is, to the last bit.
        self._factor = 1.0 if amount * world_size == total else amount * each

    def _checked(self, amount: float | None) -> float:
        if amount is None:
            raise ConfigurationError(
                "This backward does not say how many samples its loss is the mean of.",
                evidence="the sharded model was called without a tensor argument",
                do="put loss.backward() into `with rankwise.weight(model, num_samples):`",
            )
        if not (math.isfinite(amount) and amount >= 0):
            raise ConfigurationError(
                f"The weight of a backward must be zero or more, not {amount}.",
                do="pass the number of samples or tokens the loss is the mean of",
            )
        return float(amount)

    def _before_reduction(self, group: FSDPParamGroup) -> None:
        """Multiply what backward has left in a block. Called when backward has left the block."""
        for one in params_of(group):
            number = self._number_of[id(one)]
            parameter = whole_of(one)
            gradient = None if parameter is None else parameter.grad
            if gradient is not None:
                if not self._in_backward:
                    self._begin(self._latest)
                self._used.add(number)
                _multiply(gradient, self._factor)
            if self._is_accumulating:
                if parameter is not None and gradient is not None:
                    # Kept here, since each version of torch keeps it in its own way, or reduces it as it is.
                    _add_to(self._earlier, number, gradient, reduce_dtype_of(one))
                    parameter.grad = None
            elif number in self._earlier:
                earlier = self._earlier.pop(number)
                _multiply(earlier, self._carried_factor)
                if gradient is not None:
                    earlier.add_(gradient)
                reduce_instead(one, earlier)

    # -- when backward has run ---------------------------------------------------------------------

    def _end_last(self) -> None:
        # What is queued now comes after torch's own end of backward, which reduces the last block.
        run_after_backward(self._end)

    def _end(self) -> None:
        if not self._in_backward:
            return
        self._in_backward = False
        if self._is_accumulating:
            self._carried += self._amount
            self._num_carried += 1
            self._factor = 1.0
            return
        try:
            self._forget_unused()
        finally:
            self._close()
        if self.on_mean is not None:
            self.on_mean(self._total)
        if self._exchange is not None:
            self._num_synced += 1
            record = self._exchange.watch.record
            record.step = max(record.step, self._num_synced)

    def _forget_unused(self) -> None:
        """Take back the zeros that torch gave to parameters which no rank used."""
        unused = [number for number in range(len(self._places)) if number not in self._used]
        if self._uses is not None:
            self._uses.claim()
            self._uses.start(1.0, 1.0, unused)
            # Who used everything need not know what the others did.
            if unused:
                self._uses.finish()
                unused = [number for number in unused if not self._uses.is_flag_set(number)]
        for number in unused:
            if number in self._without_gradient:
                group, index = self._places[number]
                sharded_of(params_of(group)[index]).grad = None

    def forget_broken(self) -> None:
        """Forget a backward that did not finish, and the microsteps before it, if there was one."""
        if not self._in_backward:
            return
        model = self._model()
        if isinstance(model, FSDPModule):
            model.reset_iter_state()
        for group in self._groups:
            for one in params_of(group):
                forget_gradient(one)  # what the broken backward left
        self._in_backward = False
        self._close()

    def _close(self) -> None:
        self._earlier.clear()
        self._used.clear()
        self._factor = self._carried_factor = self._unit = 1.0
        self._carried = 0.0
        self._num_carried = 0


class BeforeForward:
    """The hook that runs before a sharded model's forward."""

    def __init__(
        self,
        sync: ShardSync,
        same: SameForward,
        weight: Callable[..., float | torch.Tensor] | None,
        prepare: Callable[[nn.Module], None],
    ) -> None:
        self._sync = sync
        self._same = same
        self._weight = weight
        self._prepare = prepare

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the other ranks what the call stands for."""
        if in_backward():
            return
        self._same.meet(module)
        self._sync.forget_broken()
        self._prepare(module)
        if torch.is_grad_enabled():
            self._sync.before_forward(samples_of(self._weight, args, kwargs))


class AfterForward:
    """The hook that runs after it."""

    def __init__(self, sync: ShardSync) -> None:
        self._sync = sync

    @uncompiled
    def __call__(self, _: nn.Module, __: object, output: object) -> None:
        """Follow what the call returned, to where backward comes from."""
        if torch.is_grad_enabled() and not in_backward():
            self._sync.after_forward(output)


def _multiply(gradient: torch.Tensor, factor: float) -> None:
    """Multiply in place. Nothing of a gradient that does not count is left, not even a NaN."""
    if factor == 1.0:
        return
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    with torch.no_grad():
        if factor == 0.0:
            local.zero_()
        else:
            local.mul_(factor)


def _add_to(earlier: dict[int, torch.Tensor], number: int, gradient: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Add a microstep's gradient to those that wait for the last one, in the dtype they are reduced in."""
    with torch.no_grad():
        if number in earlier:
            earlier[number] += gradient
        else:
            earlier[number] = gradient.to(dtype or gradient.dtype)
