# SPDX-License-Identifier: Apache-2.0
"""Exact gradients of a sharded model: torch reduces them, and averages ranks with equal weights.

Each rank multiplies its gradients by its weight before the reduction if the weights are not equal; so it does for each
microstep of an accumulation. A parameter that no rank used keeps ``grad=None``. Used by shard.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rankwise.comm.backends.protocol import ChannelSize
from rankwise.log import WARNING, log
from rankwise.replicate.bucket import power_near
from rankwise.replicate.gradient_hooks import GradientHooks
from rankwise.replicate.loss.graph import is_zero, mark_output, multiply_, ratio
from rankwise.replicate.loss.loss_on_ranks import LossOnRanks, model_numbers
from rankwise.replicate.no_sync_and_weight import Microsteps
from rankwise.replicate.own_hooks import OwnHook
from rankwise.replicate.split_tensors import refuse_second_derivatives
from rankwise.replicate.state_guard.guard import StateGuard
from rankwise.shard.fresh_forward import FreshForward
from rankwise.torch_private.autograd import run_after_backward
from rankwise.torch_private.fsdp import (
    call_before_reduction,
    forget_gradient,
    give_instead,
    groups_of,
    params_of,
    reduce_dtype_of,
    reduce_instead,
    sharded_of,
    whole_of,
)
from rankwise.world.device.kinds import is_accelerator

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping, Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import Amount, BucketChannel, Exchange
    from rankwise.comm.session import Session
    from rankwise.replicate.loss.graph import ForwardCall
    from rankwise.torch_private.fsdp import FSDPParamGroup


class ShardSync:
    """The gradients of one sharded model, from ``shard`` until the model is deleted.

    Its many fields are one backward's state: its weights, what it has reduced, and the parameters that it has seen.
    """

    strategy = "shard"

    def __init__(self, model: nn.Module, name: str, exchange: Exchange | None, session: Session) -> None:
        """Follow the blocks of ``model``.

        Args:
            model: sharded already.
            name: of the model, before torch renamed it.
            exchange: for its weights; of torch, unless this rank waits in no collective of torch's.
            session: the open one.
        """
        self._on_mean: Callable[[float], None] | None = None
        self._total: Amount = 0.0
        """The number that the gradients of the backward under way will be the mean over."""
        self._model = ref(model)
        self._exchange = exchange
        self._groups = groups_of(model)
        self._places = [(group, index) for group in self._groups for index in range(len(params_of(group)))]
        self._number_of = {id(params_of(group)[index]): i for i, (group, index) in enumerate(self._places)}
        self._accumulation = ShardedAccumulation()
        own, number = list(model.parameters()), next(model_numbers)
        device = torch.device(session.world.device)
        self.loss = LossOnRanks(
            number,
            own,
            exchange,
            name,
            self._accumulation,
            reports_at_start=True,
            device=device if is_accelerator(device.type) else None,
        )
        if exchange is not None:
            named = dict(model.named_parameters())
            # Ranks hold different parts of each parameter, but step them alike.
            self.loss.guard_by(StateGuard(name, named, {}, exchange, session, reads_values=False, reads_facts=False))
        self._uses: BucketChannel | None = None
        if exchange is not None:
            # On the CPU: the host asks for it, and need not wait for a device.
            size = ChannelSize(1, len(self._places), torch.float64, torch.device("cpu"))
            (self._uses,) = exchange.channels([size], f"uses of {name}")
        self._call: ForwardCall | None = None
        """The latest forward."""
        self._in_backward = False
        self._is_weighed = False
        """Whether the weights of all ranks are known."""
        self._factor: Amount = 1.0
        """The factor for this rank's gradients before they are reduced."""
        self._carried_factor: Amount = 1.0
        """The same for those of earlier microsteps."""
        self._hooks = GradientHooks(list(dict(model.named_parameters())), own)
        self._used: set[int] = set()
        self._without_gradient: set[int] = set()
        self._num_synced = 0
        self._unseen = [params_of(group)[index] for group, index in self._places]
        """Parameters that torch has not gathered yet."""
        for group in self._groups:
            call_before_reduction(group, self._before_reduction)
        forwards = [FreshForward(group) for group in self._groups]
        model.register_forward_hook(OwnHook(partial(_after_error, name, forwards)), always_call=True)
        give_instead(model, partial(_shards_of_gathered, forwards))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of the model, as they are sharded."""
        model = self._model()
        return [] if model is None else list(model.parameters())

    def set_accumulating(self, value: bool) -> bool:  # noqa: FBT001 - what it sets
        """Set whether another microstep follows the one under way; return the value before."""
        model = self._model()
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(not value)
        return self._accumulation.set_continued(value)

    def set_given_weight(self, amount: Amount | None) -> Amount | None:
        """Set the number that the loss is a mean over; return the value before."""
        return self.loss.set_given_weight(amount)

    def report_mean_to(self, listener: Callable[[float], None]) -> None:
        """Call ``listener`` at the end of backward with the number that gradients are the mean over, on all ranks."""
        self._on_mean = listener

    def is_mid_step(self) -> bool:
        """Whether gradients of some microsteps wait, on every rank, for those of the last."""
        return self._accumulation.is_open

    # -- around forward ----------------------------------------------------------------------------

    def before_forward(self, call: ForwardCall) -> None:
        """Prepare for a forward that may be trained. Called by: every rank."""
        for group in self._groups:
            for one in params_of(group):
                # A layer may have been unfrozen: torch's whole parameters follow the sharded ones.
                whole, requires_grad = whole_of(one), sharded_of(one).requires_grad
                if whole is not None and whole.requires_grad != requires_grad:
                    whole.requires_grad_(requires_grad)
        self.loss.note_forward(call.num_samples)
        self._call = call

    def after_forward(self, output: object) -> None:
        """Follow the output of that forward, where backward comes from."""
        call = self._call
        if call is None:
            return
        if self._unseen:
            self.loss.own(whole for one in self._unseen if (whole := whole_of(one)) is not None)
            self._unseen = [one for one in self._unseen if whole_of(one) is None]
        for reached in mark_output(output, call):
            reached.register_hook(lambda _: self.begin(call.num_samples))

    # -- while backward runs -----------------------------------------------------------------------

    def begin(self, weight: Amount | None) -> None:
        """Start a backward whose loss is a mean over ``weight`` samples. Further calls change nothing."""
        if self._in_backward:
            return
        self._in_backward = True
        refuse_second_derivatives("shard")
        self.loss.begin(weight)
        if self._accumulation.is_continued or self._accumulation.is_open:
            self.loss.check_unit()
        if self._accumulation.is_continued:
            self._factor = self._accumulation.factor(self._share())
        else:
            # torch calls no hook that changes the gradient of a sharded parameter.
            self._hooks.begin(is_deferred=True)
            self.loss.report()
            self._is_weighed = False
            self._without_gradient = {
                number
                for number, (group, index) in enumerate(self._places)
                if sharded_of(params_of(group)[index]).grad is None
            }
        run_after_backward(self._end_last)

    def before_collective(self) -> None:
        """Do nothing: torch's own collectives follow the order of the blocks, which is that of every rank."""

    def _share(self) -> Amount:
        return 1.0 if self.loss.is_sum else self.loss.weight

    def _weigh(self) -> None:
        """Wait for the weights of all ranks, unless they are known."""
        if self._is_weighed or self._accumulation.is_continued:
            return
        combined = self.loss.receive()
        self._is_weighed = True
        carried, share = self._accumulation.carried, self._share()
        self._total = carried + share if combined is None else combined.weight
        world_size = 1 if self._exchange is None else self._exchange.world_size
        if self.loss.is_sum_on_ranks():
            # torch's mean over ranks becomes their sum, in which a rank without samples does not count.
            self._factor = 0.0 if is_zero(share) else float(world_size)
            self._carried_factor = world_size * self._accumulation.unit
            return
        each = ratio(float(world_size), self._total)
        self._carried_factor = self._accumulation.unit * each
        # With equal weights torch's mean is exact, to the last bit.
        if isinstance(each, torch.Tensor):
            self._factor = ratio(share * world_size, self._total)
        else:
            self._factor = 1.0 if share * world_size == self._total else share * each

    def _before_reduction(self, group: FSDPParamGroup) -> None:
        """Multiply the gradients of a block by their weight. Called when backward has left the block."""
        refuse_second_derivatives("shard")
        for one in params_of(group):
            number = self._number_of[id(one)]
            parameter = whole_of(one)
            gradient = None if parameter is None else parameter.grad
            if gradient is not None:
                if not self._in_backward:
                    self.begin(self.loss.forward_weight)
                self._weigh()
                self._used.add(number)
                _multiply(gradient, self._factor)
            if self._accumulation.is_continued:
                if parameter is not None and gradient is not None:
                    self._accumulation.keep(number, gradient, reduce_dtype_of(one))
                    parameter.grad = None
                continue
            earlier = self._accumulation.pop(number)
            if earlier is not None:
                self._weigh()
                _multiply(earlier, self._carried_factor)
                if gradient is not None:
                    earlier.add_(gradient)
                reduce_instead(one, earlier)

    # -- when backward has run ---------------------------------------------------------------------

    def _end_last(self) -> None:
        # Callbacks that are queued now run after torch's own end of backward, which reduces the last block.
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
            self._hooks.change({})
            self.loss.end_step()
            if self._on_mean is not None:
                self._on_mean(self.loss.counted(float(self._total)))
            self._hooks.follow()
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
            # A rank that used everything need not know what the others used.
            if unused:
                self._uses.finish()
                unused = [number for number in unused if not self._uses.is_flag_set(number)]
        for number in unused:
            if number in self._without_gradient:
                group, index = self._places[number]
                sharded_of(params_of(group)[index]).grad = None

    def forget_broken(self) -> None:
        """Forget a backward that did not finish, if there was one, and the microsteps before it."""
        if not self._in_backward:
            return
        model = self._model()
        if isinstance(model, FSDPModule):
            model.reset_iter_state()
        for group in self._groups:
            for one in params_of(group):
                forget_gradient(one)
        self._in_backward = False
        self._close()

    def _close(self) -> None:
        self._accumulation.close()
        self._used.clear()
        self._factor = self._carried_factor = 1.0
        self._hooks.end()
        self.loss.end()


def _shards_of_gathered(forwards: Sequence[FreshForward]) -> dict[int, nn.Parameter]:
    """Return the shard of each parameter that torch keeps whole, for a loss outside forward: the shards have gradients.

    ``model.zero_grad()`` between forward and backward, or clipping after an evaluation, would miss them.
    """
    return {number: shard for one in forwards for number, shard in one.shards_of_gathered().items()}


def _after_error(name: str, forwards: Sequence[FreshForward], model: nn.Module, _: object, output: object) -> None:
    """Have a forward that follows one that raised an error start over: torch would take it for the same one."""
    if output is not None or sys.exception() is None:
        return
    for one in forwards:
        one.start_over()
    # Source: FSDPModule.reset_iter_state, from torch 2.13 on.
    reset = getattr(model, "reset_iter_state", None)
    if reset is None:
        log(
            f"{WARNING} the forward of {name} raised an error, and this version of torch cannot continue after one in "
            "a sharded model: end the training, or use torch 2.13 or newer"
        )
    else:
        reset()


class ShardedAccumulation(Microsteps):
    """The microsteps of a sharded model, whose whole gradients are added up on this rank.

    Each version of torch keeps the gradients of microsteps in its own way, or reduces them as they are. It reduces a
    step's gradients before it adds them to ``grad``, so earlier ones need not be put aside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unit: Amount = 1.0
        """The unit of this rank's weights, so that gradients keep about their size."""
        self._earlier: MutableMapping[int, torch.Tensor] = {}
        """By number of the parameter, the weighted sum of the gradients of microsteps: [as the whole one]."""

    def factor(self, weight: Amount) -> Amount:
        """Return the factor for the gradients of a microstep of this weight."""
        if not self.is_open and isinstance(weight, torch.Tensor):
            # A power of two, too: the number divided by its mantissa.
            self.unit = torch.where(weight > 0, weight / torch.frexp(weight).mantissa, 1.0)
        elif not self.is_open:
            self.unit = power_near(float(weight)) if weight > 0 else 1.0
        return weight / self.unit

    def keep(self, number: int, gradient: torch.Tensor, dtype: torch.dtype | None) -> None:
        """Add a microstep's gradient, already multiplied, to the sum that waits for the last microstep.

        The sum is kept in ``dtype``, in which it will be reduced; ``None``: in its own.
        """
        with torch.no_grad():
            if number in self._earlier:
                self._earlier[number] += gradient
            else:
                self._earlier[number] = gradient.to(dtype or gradient.dtype)

    def pop(self, number: int) -> torch.Tensor | None:
        """Return the sum for a parameter, and forget it."""
        return self._earlier.pop(number, None)

    def add(self, weight: Amount) -> None:
        """Count a microstep that has been added up."""
        self.carried += weight
        self.is_open = True

    def close(self) -> None:
        """Forget everything."""
        self._earlier.clear()
        self.counted_in = None
        self.carried = 0.0
        self.unit = 1.0
        self.is_open = False


def _multiply(gradient: torch.Tensor, factor: Amount) -> None:
    """Multiply in place. A factor of zero leaves nothing of the gradient, not even a NaN."""
    multiply_(gradient.to_local() if isinstance(gradient, DTensor) else gradient, factor)
