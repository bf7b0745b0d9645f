# SPDX-License-Identifier: Apache-2.0
"""Exact gradients of a sharded model: torch reduces them, and averages ranks with equal weights.

What each rank hands to the reduction is multiplied by its weight first, where the weights are not equal; so is each
microstep of an accumulation. What no rank used keeps ``grad=None``. Used by shard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rankwise.comm.backends.protocol import ChannelSize
from rankwise.parallel.loss.hooks import mark_output, samples_of, sizes_of_first, tensors_with_grad
from rankwise.parallel.loss.loss_on_ranks import LossOnRanks, model_numbers
from rankwise.parallel.loss.terms import ForwardCall
from rankwise.parallel.shard.accumulation import ShardedAccumulation
from rankwise.parallel.state_guard.guard import StateGuard
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

    from rankwise.comm.backends.protocol import BucketChannel
    from rankwise.comm.backends.torch_group import TorchGroup
    from rankwise.comm.session import Session
    from rankwise.parallel.core.buffers import BufferSync
    from rankwise.parallel.core.same_inputs import SameForward
    from rankwise.torch_private.fsdp import FSDPParamGroup


class ShardSync:
    """The gradients of one sharded model, from ``shard`` until the model is gone."""

    strategy = "shard"

    def __init__(self, model: nn.Module, name: str, exchange: TorchGroup | None, session: Session) -> None:
        """Note the blocks of ``model``.

        Args:
            model: sharded already.
            name: of the model, before torch named it again.
            exchange: of its own. torch's: it moves on while this rank calculates, or waits in torch.
            session: the open one.
        """
        self._on_mean: Callable[[float], None] | None = None
        self._total = 0.0
        """What the gradients of the backward under way will be the mean over."""
        self._model = ref(model)
        self._exchange = exchange
        self._groups = groups_of(model)
        self._places = [(group, index) for group in self._groups for index in range(len(params_of(group)))]
        self._number_of = {id(params_of(group)[index]): i for i, (group, index) in enumerate(self._places)}
        self._accumulation = ShardedAccumulation()
        own, number = list(model.parameters()), next(model_numbers)
        self.loss = LossOnRanks(number, own, exchange, name, self._accumulation, reports_at_start=True)
        """What the loss of each backward is a mean over."""
        if exchange is not None:
            named = dict(model.named_parameters())
            # Ranks hold other parts of each, but step them alike.
            self.loss.guard_by(StateGuard(name, named, {}, exchange, session, reads_values=False, reads_facts=False))
        self._uses: BucketChannel | None = None
        if exchange is not None:
            # The host asks for it, and need not wait for a device.
            size = ChannelSize(1, len(self._places), torch.float64, torch.device("cpu"))
            (self._uses,) = exchange.channels([size], f"uses of {name}")
        self._sizes: tuple[int, ...] = ()
        """Of the first tensor that the latest forward was given."""
        self._in_backward = False
        self._is_weighed = False
        """Whether the weights of all ranks are known."""
        self._factor = 1.0
        """What a rank's gradients are multiplied with before they are reduced."""
        self._carried_factor = 1.0
        """The same for those of earlier microsteps."""
        self._used: set[int] = set()
        self._without_gradient: set[int] = set()
        self._num_synced = 0
        self._unseen = [params_of(group)[index] for group, index in self._places]
        """Parameters of which there was no whole one yet."""
        for group in self._groups:
            call_before_reduction(group, self._before_reduction)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of the model, as they are sharded."""
        model = self._model()
        return [] if model is None else list(model.parameters())

    def set_accumulating(self, value: bool) -> bool:  # noqa: FBT001 - what it sets
        """Say whether another microstep follows the one under way; return what was said before."""
        model = self._model()
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(not value)
        return self._accumulation.set_continued(value)

    def set_given_weight(self, amount: float | None) -> float | None:
        """Say what the loss is a mean over; return what was said before."""
        return self.loss.set_given_weight(amount)

    def report_mean_to(self, listener: Callable[[float], None]) -> None:
        """Call ``listener`` at the end of backward with what gradients are the mean over, on all ranks together."""
        self._on_mean = listener

    def is_mid_step(self) -> bool:
        """Whether gradients of some microsteps wait, on every rank, for those of the last."""
        return self._accumulation.is_open

    # -- around forward ----------------------------------------------------------------------------

    def before_forward(self, amount: float | None, sizes: tuple[int, ...]) -> None:
        """Note what the call stands for.

        Called by: every rank, before a forward that may be trained.

        Args:
            amount: what it says its loss is a mean over.
            sizes: of the first tensor that it is given.
        """
        self._follow_unfrozen()
        self.loss.note_forward(amount)
        self._sizes = sizes

    def _follow_unfrozen(self) -> None:
        """Have torch's whole parameters need gradients where the sharded ones do by now."""
        for group in self._groups:
            for one in params_of(group):
                whole, requires_grad = whole_of(one), sharded_of(one).requires_grad
                if whole is not None and whole.requires_grad != requires_grad:
                    whole.requires_grad_(requires_grad)

    def after_forward(self, output: object) -> None:
        """Follow what the call returned."""
        if self._unseen:
            self.loss.own(whole for one in self._unseen if (whole := whole_of(one)) is not None)
            self._unseen = [one for one in self._unseen if whole_of(one) is None]
        amount = self.loss.forward_weight
        outputs = tensors_with_grad(output)
        mark_output(outputs, ForwardCall(self.loss.number, amount, self._sizes))
        for reached in outputs:
            reached.register_hook(lambda _: self._begin(amount))

    # -- while backward runs -----------------------------------------------------------------------

    def _begin(self, amount: float | None) -> None:
        """Start a backward. Further calls change nothing."""
        if self._in_backward:
            return
        self.loss.begin(amount)
        self._in_backward = True
        if self._accumulation.is_continued or self._accumulation.is_open:
            self.loss.check_unit()
        if self._accumulation.is_continued:
            self._factor = self._accumulation.factor(self._share())
        else:
            self.loss.report()
            self._is_weighed = False
            self._without_gradient = {
                number
                for number, (group, index) in enumerate(self._places)
                if sharded_of(params_of(group)[index]).grad is None
            }
        run_after_backward(self._end_last)

    def _share(self) -> float:
        """Return the weight of the backward under way."""
        return 1.0 if self.loss.is_sum else self.loss.weight

    def _weigh(self) -> None:
        """Wait for the weights of all ranks, where they are not known yet."""
        if self._is_weighed or self._accumulation.is_continued:
            return
        combined = self.loss.receive()
        self._is_weighed = True
        carried, share = self._accumulation.carried, self._share()
        self._total = carried + share if combined is None else combined.weight
        world_size = 1 if self._exchange is None else self._exchange.world_size
        if self.loss.is_sum_on_ranks():
            # torch's mean over ranks is their sum then, in which one without samples does not count.
            self._factor = float(world_size) if share else 0.0
            self._carried_factor = world_size * self._accumulation.unit
            return
        each = world_size / self._total if self._total > 0 else 0.0
        self._carried_factor = self._accumulation.unit * each
        # Equal weights leave torch's mean as it is, to the last bit.
        self._factor = 1.0 if share * world_size == self._total else share * each

    def _before_reduction(self, group: FSDPParamGroup) -> None:
        """Multiply what backward has left in a block. Called when backward has left the block."""
        for one in params_of(group):
            number = self._number_of[id(one)]
            parameter = whole_of(one)
            gradient = None if parameter is None else parameter.grad
            if gradient is not None:
                if not self._in_backward:
                    self._begin(self.loss.forward_weight)
                self._weigh()
                self._used.add(number)
                _multiply(gradient, self._factor)
            if self._accumulation.is_continued:
                if parameter is not None and gradient is not None:
                    self._accumulation.keep(number, gradient, reduce_dtype_of(one))
                    parameter.grad = None
                continue
            earlier = self._accumulation.take(number)
            if earlier is not None:
                self._weigh()
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
        if self._accumulation.is_continued:
            self._accumulation.add(self._share())
            self._factor = 1.0
            self.loss.end()
            return
        try:
            self._weigh()
            self._forget_unused()
            if self.loss.guard is not None:
                self.loss.guard.check()
            if self._on_mean is not None:
                self._on_mean(self.loss.counted(self._total))
        finally:
            self._close()
        if self._exchange is not None:
            self._num_synced += 1
            self._exchange.detector.recorder.note_step(self._num_synced)

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
        self._accumulation.close()
        self._used.clear()
        self._factor = self._carried_factor = 1.0
        self.loss.end()


class BeforeShardedForward:
    """The hook that runs before a sharded model's forward."""

    def __init__(
        self,
        sync: ShardSync,
        same: SameForward,
        weight: Callable[..., float | torch.Tensor] | None,
        prepare: Callable[[nn.Module, object], None],
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
        self._prepare(module, (args, kwargs))
        if torch.is_grad_enabled():
            self._sync.before_forward(samples_of(self._weight, args, kwargs), sizes_of_first(args, kwargs))


class AfterShardedForward:
    """The hook that runs after it."""

    def __init__(self, sync: ShardSync, buffers: BufferSync | None) -> None:
        self._sync = sync
        self._buffers = buffers

    @uncompiled
    def __call__(self, module: nn.Module, _: object, output: object) -> None:
        """Follow what the call returned, to where backward comes from."""
        if torch.is_grad_enabled() and not in_backward():
            if self._buffers is not None and module.training:
                self._buffers.after_forward()
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
