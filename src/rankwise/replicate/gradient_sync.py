# SPDX-License-Identifier: Apache-2.0
"""Gradients of one model, made equal on all ranks while backward runs.

A hook after forward marks the output with the number of samples. Hooks on the parameters send each bucket once it is
full; when ``backward()`` returns every gradient is the exact mean over all samples of all ranks. Weights are counted in
units that all ranks share. Used by replicate, local_sgd and the parameter servers.
"""

from __future__ import annotations

import threading
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from rankwise import meter
from rankwise.comm.backends.choose import ThroughHost
from rankwise.compress.methods import Narrow
from rankwise.meter import BACKWARD, EXCHANGE
from rankwise.replicate.bucket import Weights, WeightUnit, own_gradient
from rankwise.replicate.buffers import count_registrations
from rankwise.replicate.gradient_buckets import GradientBuckets, SendOrder
from rankwise.replicate.gradient_hooks import FollowedParameters, GradientHooks
from rankwise.replicate.loss.graph import forward_call, mark_output, multiply_, ratio
from rankwise.replicate.loss.loss_on_ranks import LossOnRanks, model_numbers
from rankwise.replicate.no_sync_and_weight import Accumulation
from rankwise.replicate.own_hooks import OwnHook
from rankwise.replicate.same_model import FirstCall, first_call_of, report_first_calls
from rankwise.torch_private.autograd import NO_GRAPH, graph_task, run_after_backward
from rankwise.torch_private.compiler import between_graphs, skipped
from rankwise.torch_private.tensors import foreach_div_, foreach_mul_, foreach_zero_

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import Amount, Exchange
    from rankwise.compress.methods import Method

STEPS_OF_UNIT = 3
"""How many of the first steps adjust the unit of weights that are on a device."""

_in_turn = threading.Lock()
_round: list[GradientSync] = []
"""The syncs that take part in the backward under way: several where one loss crosses several models."""


class GradientSync:
    """The gradients of one model, from ``replicate`` until the model is deleted.

    Its many fields are the parts of a step, which meet here, and what listens to them.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        group: Exchange | None,
        model_name: str = "a model",
        compress: Method | None = None,
        *,
        strategy: str = "replicate",
        sparse: Container[int] = (),
    ) -> None:
        """Follow parameters.

        Args:
            names: of the parameters.
            parameters: of the model.
            group: the ranks that average their gradients; ``None``: nothing is averaged here.
            model_name: for errors.
            compress: how gradients are compressed for sending.
            strategy: that the model went through.
            sparse: identities of the parameters whose gradients are sparse.
        """
        self.followed = FollowedParameters(names, parameters, strategy)
        self.strategy, self.names, self.parameters = strategy, self.followed.names, self.followed.parameters
        self.number = next(model_numbers)
        """Ranks replicate their models in one order, so it is the same on every rank."""
        self._group = group
        self.num_ranks = 1 if group is None else group.world_size
        """How many ranks the gradients are averaged over."""
        self._model_name = model_name
        self._has_no_call = self.num_ranks > 1
        """Whether the inputs of the first step, for ranks to compare, are still missing."""
        self._first_call: FirstCall | None = None
        self._num_synced = 0
        is_float16 = Narrow("fp16") == compress or any(p.dtype == torch.float16 for p in self.parameters)
        self._unit = WeightUnit(is_open=is_float16)
        self._accumulation = Accumulation(self.names, self.parameters)
        self.loss = LossOnRanks(
            self.number,
            self.parameters,
            group,
            model_name,
            self._accumulation,
            device=_device_of_weights(self.parameters, group, compress),
        )
        self.loss.when_interrupted(_abandon_round)
        self._on_mean: Callable[[float], None] | None = None
        self._on_backward: Callable[[], None] | None = None
        self._on_forward: Callable[[], None] | None = None
        self._in_backward = False
        self._has_gradients = False
        self._compress = compress
        self._sparse = {number for number, parameter in enumerate(self.parameters) if id(parameter) in sparse}
        self._buckets: GradientBuckets | None = None
        is_queued = group is not None and group.detector.queue is not None and self.followed.kind[1].type != "cpu"
        self.order = SendOrder(needs_one=is_queued)
        self._hooks = None if group is None else GradientHooks(self.names, self.parameters)
        self.hook_new_parameters()

    def set_accumulating(self, value: bool) -> bool:  # noqa: FBT001 - what it sets
        """Set whether another backward follows before the next exact gradient; return the value before."""
        if value:
            self._accumulation.expect(sorted(self.followed.hooked), self._share)
        return self._accumulation.set_continued(value)

    def set_given_weight(self, amount: Amount | None) -> Amount | None:
        """Set the number that the loss is a mean over; return the value before."""
        return self.loss.set_given_weight(amount)

    def report_mean_to(self, listener: Callable[[float], None]) -> None:
        """Call ``listener`` at the end of backward with the number that gradients are the mean over, on all ranks."""
        self._on_mean = listener

    def report_backwards_to(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever a backward begins that synchronizes, as often as on every other rank."""
        self._on_backward = listener

    def report_forwards_to(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` before each forward pass that may be trained, unless it is one of several microsteps."""
        self._on_forward = listener

    def before_forward(self, *_: object) -> None:
        """Call what :meth:`report_forwards_to` was given: forward itself may change parameters. Called by torch."""
        is_microstep = self._accumulation.is_continued or self._accumulation.is_open
        is_trained = torch.is_grad_enabled() and graph_task() == NO_GRAPH
        if self._on_forward is not None and not is_microstep and is_trained:
            self._on_forward()

    def is_mid_step(self) -> bool:
        """Whether gradients of some microsteps wait, on every rank, for those of the last."""
        return self._accumulation.is_open

    # -- set-up ------------------------------------------------------------------------------------

    def hook_new_parameters(self) -> None:
        """Follow parameters that need gradients now: a layer may be unfrozen after ``replicate``."""
        # torch runs the hooks of each device in a thread of its own.
        is_alone = len({parameter.device for parameter in self.parameters}) == 1
        note = GradientSync._note_gradient if is_alone else GradientSync._note_gradient_in_turn
        # The parameter holds its hook: one that held the sync would never release the model's memory.
        if self.followed.hook_new(partial(note, ref(self))) and self._group is not None:
            self._build(self._group, sorted(self.followed.hooked, reverse=True))
            self.order.start_over()

    def _build(self, group: Exchange, order: Sequence[int]) -> None:
        self._buckets = GradientBuckets(
            self.parameters,
            order,
            group,
            f"gradients of {self._model_name}",
            self._compress,
            names=self.names,
            replaced=self._buckets,
            sparse=self._sparse,
        )

    def before_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start over if an error interrupted the backward before, and follow layers unfrozen since.

        Called by: the end of every forward pass that backward may follow, with the arguments of the call.
        """
        if _round:  # no backward is under way
            _abandon_round()
        if self._in_backward:
            self.abandon()
        first = self.followed.parameters[0]
        if (first.dtype, first.device) != self.followed.kind:
            raise self.followed.changed()
        if self.followed.unhooked:
            self.hook_new_parameters()
        if self._has_no_call:
            self._has_no_call = False
            self._first_call = first_call_of(args, kwargs)

    def stop(self) -> None:
        """Follow no gradient any more: the model goes through a strategy again."""
        self.abandon()
        self.followed.remove_hooks()
        if self._hooks is not None:
            self._hooks.stop()

    # -- while backward runs -----------------------------------------------------------------------

    def begin(self, weight: Amount | None, _gradient: object = None) -> None:
        """Start a backward whose loss is a mean over ``weight`` samples. Repeated calls do nothing.

        Also called by torch, with the gradient of an output of the model.
        """
        if self._in_backward:
            return
        self._in_backward = True
        accumulation = self._accumulation
        if self._on_backward is not None and not accumulation.is_continued:
            self._on_backward()
        is_accumulated = accumulation.is_continued or accumulation.is_open
        if self._hooks is not None:
            self._hooks.begin(is_deferred=not is_accumulated)
        if weight is None and self._group is None and self._on_mean is None and not is_accumulated:
            # Nothing is averaged, so the weight need not be known.
            weight = 1.0
        self.loss.begin(weight)
        if is_accumulated:
            accumulation.begin(sorted(self.followed.hooked), self._share, continues=accumulation.is_continued)
        if not _round:
            run_after_backward(_finish_round)
        _round.append(self)

    def _share(self) -> Amount:
        """Return the weight of the backward under way, in units of the mean weight of a rank's step."""
        if not self._in_backward:
            self.begin(self.loss.forward_weight)
        weight = self.loss.weight
        if self.loss.is_sum or not isinstance(weight, torch.Tensor):
            return 1.0 if self.loss.is_sum else weight / self._unit.size
        return self._unit.share_on_device(weight)

    def before_collective(self) -> None:
        """Send the buckets that all ranks send before the collective of another exchange that follows.

        Called by: every rank, before each collective in backward that is not this class's own.
        """
        if (
            self._buckets is not None
            and self.order.is_known
            and not (self._accumulation.is_continued or self._unit.is_open)
        ):
            self._buckets.send_before(self.order.num_others, self._report_weights)
        self.order.note_other()

    @staticmethod
    def _note_gradient(reference: ref[GradientSync], number: int, _: torch.Tensor) -> None:
        """Note that the gradient of a parameter is complete. Called by torch, once per parameter and step."""
        self = reference()
        if self is None:
            return
        if not self._in_backward:
            self.begin(self.loss.forward_weight)
        self._has_gradients = True
        if self._buckets is None or self._accumulation.is_continued:
            return
        if not self.order.is_known:
            self.order.note_turn(number)
        if self._buckets.note_arrival(number) and not (self._unit.is_open or self.order.is_held):
            self._buckets.send_full(self._report_weights())

    @staticmethod
    def _note_gradient_in_turn(reference: ref[GradientSync], number: int, parameter: torch.Tensor) -> None:
        """The same for hooks that may run in several threads at once."""
        with _in_turn:
            GradientSync._note_gradient(reference, number, parameter)

    def _report_weights(self) -> Weights:
        """Report this rank's loss to the other ranks, and return the weights of its gradients."""
        self.loss.report()
        share = self._share()
        own = 1.0 if self._accumulation.is_open else share
        if self.loss.is_sum:
            return Weights(own, self.loss.weight)
        if self.loss.is_empty and self.loss.declared.device is not None and self.loss.is_sum_on_ranks():
            return Weights(own, 1.0 / self.num_ranks)
        scale = self._unit.scale
        return Weights(scale * own, scale * (self._accumulation.carried + share))

    # -- when backward has run ---------------------------------------------------------------------

    def send_rest(self) -> None:
        """Send the buckets that are not full: this rank did not use all of their parameters."""
        if self._group is None or self._buckets is None or self._accumulation.is_continued or not self._has_gradients:
            return
        if self._unit.is_open:
            self.loss.report()
            if not self.loss.is_sum_on_ranks():
                self._unit.agree(
                    self._group, self._accumulation.carried + self._share(), f"gradients of {self._model_name}"
                )
        if self._buckets.num_unsent:
            self._buckets.send_rest(self._report_weights())

    def collect(self) -> None:
        """Wait for the means over ranks, which become the gradients."""
        try:
            if not self._has_gradients:
                self._accumulation.close_empty()
                return
            if self._accumulation.is_open:
                self.loss.check_unit()
            if self._accumulation.is_continued:
                self._accumulation.add(self._share())
            elif self._group is None or self._buckets is None:
                self._divide_alone()
            else:
                self._hand_back(self._group, self._buckets)
                if self._hooks is not None and self._hooks.held and self._hooks.is_deferred:
                    self._hooks.follow()
        finally:
            self._start_over()

    def _start_over(self) -> None:
        self._in_backward = False
        self._has_gradients = False
        if self.order.num_others:
            self.order.forget_others()
        if self._hooks is not None and self._hooks.held:
            self._hooks.end()
        self.loss.end()

    def _hand_back(self, group: Exchange, buckets: GradientBuckets) -> None:
        total = buckets.take_back() / self._unit.scale
        is_sum = self.loss.end_step()
        if is_sum and not isinstance(total, torch.Tensor) and total != 1.0:
            # Ranks without samples sent weights as if the others' losses were no sums.
            self._multiply(total)
        if self._on_mean is not None:
            self._on_mean(self.loss.counted(float(total) * self._unit.size))
        if self._hooks is not None and self._hooks.held and self._hooks.is_deferred:
            # On a rank without samples, the means of the others include what was put aside.
            self._hooks.change(self._accumulation.earlier() if self.loss.is_empty and not is_sum else {})
        if self.loss.is_empty and not is_sum and not self._accumulation.is_open:
            # The means of the others include their earlier gradients, which are the same.
            self._accumulation.close()
        elif self._accumulation.is_begun:
            self._accumulation.give_back_earlier()
        is_read = not isinstance(total, torch.Tensor) or self._num_synced < STEPS_OF_UNIT or self._unit.scale != 1.0
        if is_read and not is_sum:  # Only the first steps read weights from the device: a unit rounds nothing.
            mean = float(total) / group.world_size
            if mean != 1.0 or self._unit.scale != 1.0:  # else the unit is that of the step before
                self._unit.adjust(mean)
        if self._num_synced == 0:
            # A rank without samples was called with others' as a stand-in.
            call = self._first_call if float(self.loss.weight) > 0 else None
            report_first_calls(call, group, self._model_name, is_sum=is_sum)
        self._num_synced += 1
        # Several models that are trained together count one step.
        group.detector.recorder.note_step(self._num_synced)
        if not self.order.is_known:
            self._settle_order(group, buckets)

    def _gradients(self) -> list[torch.Tensor]:
        return [own for p in self.parameters if (own := own_gradient(p)) is not None]

    @torch.no_grad()
    def _multiply(self, factor: Amount) -> None:
        if not isinstance(factor, torch.Tensor):
            foreach_mul_(self._gradients(), factor)
            return
        for gradient in self._gradients():
            multiply_(gradient, factor)

    @torch.no_grad()
    def _divide_alone(self) -> None:
        total = self._accumulation.carried + self._share()
        if self._on_mean is not None:
            self._on_mean(self.loss.counted(float(total)))
        is_open = self._accumulation.is_open
        if not isinstance(total, torch.Tensor) and total > 0 and not is_open:
            return
        if self.loss.is_sum:
            self._accumulation.give_back_earlier()
            return
        gradients = self._gradients()
        if isinstance(total, torch.Tensor):
            for gradient in gradients:
                multiply_(gradient, ratio(1.0, total) if is_open else (total > 0).to(total.dtype))
        elif total == 0:
            # A mean over no samples is NaN; zeros are the result of several ranks too.
            foreach_zero_(gradients)
        else:
            foreach_div_(gradients, total)
        self._accumulation.give_back_earlier()

    def _settle_order(self, group: Exchange, buckets: GradientBuckets) -> None:
        """Send as in the first step from now on. Channels with error feedback are kept."""
        if self._compress is None or isinstance(self._compress, Narrow):
            self._rebuild_in_arrival_order(group, buckets.first_arrivals)
        elif self.order.needs_one and self.order.num_others:
            buckets.send_by_turns({})
        self.order.note_known()

    def _rebuild_in_arrival_order(self, group: Exchange, arrived: Sequence[int]) -> None:
        """Lay the buckets out again, in the order in which rank zero's gradients arrived."""
        seen = dict.fromkeys(arrived)
        order = [*seen, *(i for i in sorted(self.followed.hooked, reverse=True) if i not in seen)]
        rows = torch.tensor([order, [self.order.turns.get(i, -1) for i in order]])
        of_rank_zero, turns = group.broadcast(rows, 0, what="order of gradients").tolist()
        self._build(group, of_rank_zero)
        if self._buckets is not None and self.order.needs_one and self.order.num_others:
            self._buckets.send_by_turns({i: t for i, t in zip(of_rank_zero, turns, strict=True) if t >= 0})

    def abandon(self) -> None:
        """Forget a backward that did not finish."""
        if self in _round:
            _round.remove(self)
        self._accumulation.abandon()
        if self._buckets is not None:
            self._buckets.start_over()
        self._start_over()


def _device_of_weights(
    parameters: Sequence[nn.Parameter], group: Exchange | None, compress: Method | None
) -> torch.device | None:
    """Return the device of all parameters if gradients are reduced there by weights that the host need not know."""
    devices = {parameter.device for parameter in parameters}
    takes_tensors = not isinstance(group, ThroughHost) and (compress is None or isinstance(compress, Narrow))
    return devices.pop() if takes_tensors and len(devices) == 1 and "cpu" not in {d.type for d in devices} else None


def _abandon_round() -> None:
    """Forget a backward that an error interrupted, of all its models: the next one may be of others."""
    while _round:
        _round[-1].abandon()


def _finish_round() -> None:
    """Finish every model of this backward, in one order on all ranks: send all before waiting for any."""
    syncs = sorted(_round, key=attrgetter("number"))
    _round.clear()
    is_alone = True
    for sync in syncs:
        if len(syncs) > 1:
            sync.order.note_other_models()
        is_alone = is_alone and sync.num_ranks == 1
    part = meter.current.arrive(BACKWARD if is_alone else EXCHANGE)
    try:
        for sync in syncs:
            sync.send_rest()
        for sync in syncs:
            sync.collect()
    except BaseException:
        for sync in syncs:
            sync.abandon()
        raise
    finally:
        meter.current.resume(part)


class SyncAfterForward(OwnHook):
    """Notes the number of samples of a forward call, by the user's ``weight``, and when backward reaches its output."""

    def __init__(
        self,
        sync: GradientSync,
        weight: Callable[..., float | torch.Tensor] | None,
        after_training: Callable[[], None] | None = None,
    ) -> None:
        self._sync = sync
        self._weight = weight
        self._after_training = after_training
        self._counts = count_registrations()
        self._count_seen = self._counts.parameters

    @skipped
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] - as torch calls it
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        """Note a forward call. Called by torch."""
        if torch.compiler.is_compiling():
            _note_between_graphs(self, module, args, kwargs, output)
        else:
            self.note(module, args, kwargs, output)

    @skipped
    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """Note a forward call that really runs. While ``torch.export`` runs a model, torch says that it compiles."""
        if torch.jit.is_tracing() or not torch.is_grad_enabled():
            return
        sync = self._sync
        if self._count_seen != self._counts.parameters:
            sync.followed.check_all_of(module)
            self._count_seen = self._counts.parameters
        if graph_task() == NO_GRAPH:  # else it computes a part of a checkpoint again
            if self._after_training is not None and module.training:
                self._after_training()
            sync.before_backward(args, kwargs)
        call = forward_call(sync.number, self._weight, args, kwargs)
        reached = mark_output(output, call)
        amount = call.num_samples
        if amount is None:
            return
        sync.loss.note_forward(amount)
        for one in reached:
            one.register_hook(partial(sync.begin, amount))


_note_between_graphs = between_graphs(SyncAfterForward.note)
