# SPDX-License-Identifier: Apache-2.0
"""The rounds of one model: when worker groups exchange their changes, and when the mean is applied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch

from rankwise.comm.session import current_or_none
from rankwise.comm.step_hooks import Follower, Phase, closure_of, follow, with_closure
from rankwise.errors import ConfigurationError
from rankwise.health.diagnosis import world_left
from rankwise.local_sgd.outer import step_outer
from rankwise.log import warn
from rankwise.replicate.bucket import gradient_of
from rankwise.replicate.same_model import broadcast_tensors
from rankwise.torch_private.dtensor import own_part
from rankwise.torch_private.tensors import foreach_add_, foreach_copy_, foreach_sub_

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn
    from torch.optim import Optimizer

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.session import Session
    from rankwise.comm.step_hooks import Arguments
    from rankwise.local_sgd.outer import DiLoCo, PseudoGradients


class WeighsSteps(Protocol):
    """A strategy that reports the weight of a worker group's steps."""

    def report_mean_to(self, listener: Callable[[float], None]) -> None:
        """Call ``listener`` at the end of backward with the number that the worker group's gradients average over."""
        ...


_MANY = 100
"""After this many backward passes without a step, the optimizer's steps cannot be counted."""


def exchanged(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters, by name, of which this rank holds a part to exchange."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [(name, p) for name, p in trained if not (part := own_part(p)).is_meta and part.numel()]


@torch.no_grad()
def average_buffers(model: nn.Module, across_groups: Exchange, data: Exchange | None) -> None:
    """Replace each buffer of floating-point numbers, as BatchNorm's statistics, by its mean over the worker groups.

    Called by: every rank.

    Args:
        model: any.
        across_groups: this rank, and the one at its coordinate in each other worker group.
        data: the ranks of this worker group that see samples of their own; the first one's buffers count.
    """
    parts = [own_part(buffer).detach() for buffer in model.buffers()]
    parts = [part for part in parts if part.is_floating_point() and not part.is_meta]
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for part in parts:
        by_kind.setdefault((part.dtype, part.device), []).append(part)
    for same in by_kind.values():
        own = torch.cat([part.reshape(-1) for part in same])
        # A sum of masks of the lowest number there is would be infinite, and a sum of constants would be rounded.
        first = across_groups.broadcast(own, 0, what="buffers of the first worker group")
        apart = torch.where(own == first, 0.0, own - first)
        mean = first + across_groups.all_reduce(apart, what="buffers of all worker groups") / across_groups.world_size
        for part, piece in zip(same, mean.split([part.numel() for part in same]), strict=True):
            part.copy_(piece.view(part.shape))
    if data is not None:
        broadcast_tensors(parts, data, what="buffers of a worker group's first rank")


class StepCounter:
    """The steps and the samples of one model's rounds.

    Several optimizers may use the same gradients, and some of them step more seldom than others: the steps of one are
    counted, the first that steps, or another that steps for a round alone.
    """

    def __init__(self, every: int) -> None:
        """Count from zero; a round has ``every`` steps."""
        self._every = every
        self.num_backward = 0
        self._weight = 0.0
        """Samples of the round so far."""
        self._fresh = 0.0
        """Samples of the gradients since the last step."""
        self._are_fresh_used = False
        self._used: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """How many backward passes had run at the last step of each optimizer."""
        self._counting: ref[Optimizer] | None = None
        """The optimizer whose steps are counted."""
        self._uncounted: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """Steps of the others since the last one that counted."""

    def add_backward(self, weight: float) -> None:
        """Add gradients that average over ``weight`` samples."""
        self.num_backward += 1
        self._weight += weight
        self._fresh = weight if self._are_fresh_used else self._fresh + weight
        self._are_fresh_used = False

    def num_fresh(self, optimizer: Optimizer) -> float | None:
        """Return the samples of an optimizer's gradients; ``None`` if no backward has computed any since its step."""
        return self._fresh if self.num_backward > self._used.get(optimizer, 0) else None

    def add_step(self, optimizer: Optimizer) -> bool:
        """Record that an optimizer has used the current gradients; return whether its step counts."""
        self._used[optimizer] = self.num_backward
        self._are_fresh_used = True
        counting = None if self._counting is None else self._counting()
        if counting is not None and counting is not optimizer:
            self._uncounted[optimizer] = missed = self._uncounted.get(optimizer, 0) + 1
            if missed <= self._every:
                return False
        self._counting = ref(optimizer)
        self._uncounted.clear()
        return True

    def end_round(self) -> float:
        """Return the samples of the round, and count those of the next."""
        weight, self._weight = self._weight, 0.0
        return weight


class LocalSGD(Follower):
    """The rounds of a model, from :func:`rankwise.local_sgd` until the model is deleted or the world is left.

    Its many fields are one round's state: where it began and ended, how far it is, and what it is exchanged with.

    Save it with the model and the optimizer: ``checkpoints.save(model=model, optimizer=optimizer, outer=outer)``.
    """

    def __init__(
        self,
        model: nn.Module,
        session: Session,
        trained: WeighsSteps,
        *,
        every: int,
        overlap: int,
        outer: DiLoCo | None,
        changes: PseudoGradients | None,
        data: Exchange | None,
    ) -> None:
        """See :func:`rankwise.local_sgd`, which calls it.

        Args:
            model: after its strategy was applied, the same on all worker groups.
            session: the open one.
            trained: reports the weight of each step.
            every: steps of a round.
            overlap: steps of the next round before the mean of a round is applied.
            outer: ``None`` for the plain mean.
            changes: the channels between worker groups; ``None`` if there is only one.
            data: as for :func:`average_buffers`.
        """
        self._model = ref(model)
        self._session = session
        self._name = type(model).__name__
        self._every = every
        self._overlap = overlap
        self._outer = outer
        self._changes = changes
        self._data = data
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self._all = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._own = exchanged(model)
        parts = [own_part(parameter).detach() for _, parameter in self._own]
        self._anchors = [torch.empty_like(part) for part in parts]
        has_momentum = outer is not None and outer.momentum > 0
        self._momentum = [torch.zeros_like(part) for part in parts] if has_momentum else []
        self._ends: list[torch.Tensor] | None = None
        """The parameters at the end of the round whose mean is on its way; ``None`` if none is."""
        self._has_anchors = False
        self._num_rounds = 0
        self._num_steps = 0
        self._is_begun = False
        """Whether any optimizer has begun a step since the latest round ended."""
        self._is_settled = True
        """Whether nothing has changed since all worker groups were equal."""
        self._counter = StepCounter(every)
        self._has_stepped = False
        trained.report_mean_to(self._add_backward)
        self._ids = {id(parameter) for _, parameter in self._all}
        self._stop_following = follow(self, Phase.MODEL)
        synchronize, leave = WeakMethod(self.synchronize), ref(self)
        session.average_worker_groups()
        session.before_save(lambda: None if (call := synchronize()) is None else call())
        session.on_leave(lambda: None if (one := leave()) is None else one._leave())  # noqa: SLF001 - its own

    @property
    def every(self) -> int:
        """Optimizer steps of a round."""
        return self._every

    def synchronize(self) -> None:
        """End a round now: afterwards parameters and buffers are the same on all worker groups.

        Called by: every rank. At the end of training, and before evaluating; a save calls it by itself.

        A mean that is on its way is applied first; then the steps since are averaged, as at the end of a round.
        BatchNorm's statistics, and other buffers of floating-point numbers, become their mean over the worker groups.
        Does nothing if no step was taken since the last call.

        Raises:
            ConfigurationError: the world was left.
            CollectiveMismatch: worker groups have taken different numbers of steps.
            PeerFailed: another rank failed.
        """
        if current_or_none() is not self._session:
            raise ConfigurationError(
                "synchronize() was called after leaving the world that local_sgd() was called in.",
                do="call outer.synchronize() before the end of `with rankwise.join():`",
            )
        self._warn_if_never_stepped()
        if self._changes is not None:
            more = " and a part of one" if self._is_begun and not self._num_steps else ""
            self._changes.across_groups.barrier(
                f"synchronize() of local_sgd({self._name}) after {self._num_rounds} rounds and {self._num_steps} steps"
                f"{more}"
            )
        if self._is_settled:
            return
        self._apply()
        if self._is_begun:
            self._send(overlapping=False)
            self._apply()
        if self._changes is not None and (model := self._model()) is not None:
            average_buffers(model, self._changes.across_groups, self._data)
        self._is_settled = True
        # The next round begins at the parameters of its first step: all worker groups may load others before.
        self._has_anchors = False

    # -- calls from backward and optimizers ----------------------------------------------------------

    def _add_backward(self, weight: float) -> None:
        """Count gradients that average over ``weight`` samples."""
        self._counter.add_backward(weight)
        if self._counter.num_backward == max(self._every, _MANY):
            self._warn_if_never_stepped()

    def _warn_if_never_stepped(self) -> None:
        if not self._has_stepped and self._counter.num_backward and current_or_none() is self._session:
            self._has_stepped = True  # said once
            warn(
                f"{self._counter.num_backward} backward passes of {self._name} ran without a step of an optimizer that "
                "holds its parameters: no round of local_sgd() ends, and the worker groups are not averaged; use a "
                "torch.optim.Optimizer, created with the current parameters of the model"
            )

    def concerns(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer holds parameters of the model."""
        return any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Prepare for a step of an optimizer of the model, and for each time that a closure computes its gradients."""
        self._begin_step()
        closure = closure_of(args, kwargs)
        if not callable(closure):
            self._before_update(optimizer)
            return None

        def followed_closure() -> Any:
            loss = closure()
            self._before_update(optimizer)
            return loss

        return with_closure(args, kwargs, followed_closure)

    def after_step(self, optimizer: Optimizer) -> None:
        """Count the step of an optimizer, which has used the current gradients."""
        if self._counter.add_step(optimizer) and current_or_none() is self._session:
            self._count_step()

    def _begin_step(self) -> None:
        """Copy the parameters at which a first round begins.

        Raises:
            NotJoined: the world of :func:`rankwise.local_sgd` was left.
            RankwiseError: another rank failed.
        """
        session = current_or_none()
        if session is None:
            self._stop_following()
            return
        if session is not self._session:
            raise world_left()
        detector = self._session.detector
        if detector is not None and detector.error is not None:
            # Raised here, since a long round may have no other wait.
            raise detector.error
        self._is_settled, self._is_begun, self._has_stepped = False, True, True
        if not self._has_anchors:
            # Not earlier: weights may have been loaded since local_sgd().
            for anchor, part in zip(self._anchors, self._parts(), strict=True):
                anchor.copy_(part)
            self._has_anchors = True

    def _before_update(self, optimizer: Optimizer) -> None:
        """Have an optimizer skip gradients of no samples; raise if their number of samples is unknown."""
        num_fresh = self._counter.num_fresh(optimizer)
        if num_fresh is not None and num_fresh > 0:
            return
        own = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._ids]
        if num_fresh is not None:
            # Without samples there is no update: also no decay, and no momentum of earlier steps.
            for parameter in own:
                parameter.grad = None
        elif any(parameter.grad is not None for parameter in own):
            raise ConfigurationError(
                f"optimizer.step() found gradients of {self._name} that no backward() since the last step computed, "
                "so their weight among the worker groups is unknown.",
                do="call backward() before each step, instead of torch.autograd.grad(); with several microsteps, run "
                "the last one outside rankwise.no_sync(model)",
            )

    def _count_step(self) -> None:
        """Count a step; apply a mean or end a round if it is time."""
        self._num_steps += 1
        if self._num_steps == self._overlap:
            self._apply()
        elif self._ends is not None and self._changes is not None:
            self._changes.move()
        if self._num_steps == self._every:
            self._send(overlapping=self._overlap > 0)
            if not self._overlap:
                self._apply()

    # -- a round -------------------------------------------------------------------------------------

    def _parts(self) -> list[torch.Tensor]:
        return [own_part(parameter).detach() for _, parameter in self._own]

    def _send(self, *, overlapping: bool) -> None:
        """End a round: send its changes, and begin the next, before the mean is applied if ``overlapping``."""
        unfrozen = next((p for p in self._frozen if p.requires_grad), None)
        if unfrozen is not None:
            raise ConfigurationError(
                f"A layer of {self._name} was unfrozen after local_sgd(), so its changes would not reach the other "
                "worker groups.",
                evidence=f"a parameter of shape {list(unfrozen.shape)} now requires gradients",
                do="unfreeze layers before local_sgd(), and add their parameters to the optimizer when they are to be "
                "trained",
            )
        parts = self._parts()
        weight = self._counter.end_round()
        if self._changes is not None:
            self._changes.send(self._anchors, parts, weight)
        self._ends = [part.clone() for part in parts] if overlapping else parts
        self._num_steps = 0
        self._is_begun = False
        self._num_rounds += 1

    @torch.no_grad()
    def _apply(self) -> None:
        """Take the outer optimizer's step if a mean is on its way; add the changes that were trained since."""
        parts, ends, self._ends = self._parts(), self._ends, None
        if ends is None:
            return
        if self._changes is not None:
            changes = self._changes.receive()
        elif self._outer is not None:
            changes = [anchor - end for anchor, end in zip(self._anchors, ends, strict=True)]
        else:
            return  # one worker group is its own mean
        if parts:
            step_outer(self._outer, self._anchors, changes, self._momentum)
            if self._is_begun:
                foreach_sub_(parts, ends)
                foreach_add_(parts, self._anchors)
            else:
                # A copy also replaces NaN, whose difference is never zero.
                foreach_copy_(parts, self._anchors)

    def _leave(self) -> None:
        """Finish the exchange on its way when the world is left."""
        self._warn_if_never_stepped()
        if self._ends is not None and self._changes is not None:
            self._changes.finish()
        if not self._is_settled and self._changes is not None:
            warn(
                f"the world ends with steps of {self._name} that the worker groups have not exchanged, so parameters "
                "differ between them; call outer.synchronize() at the end of training"
            )

    # -- state ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the outer optimizer after the last round that was applied.

        It belongs to parameters, so that it loads on any number of worker groups. Call :meth:`synchronize` first, as a
        save does: it does not include changes that the worker groups have not exchanged yet.
        """
        own = dict(zip([name for name, _ in self._own], self._momentum, strict=False))
        momentum: dict[str, torch.Tensor] = {}
        if self._outer is not None and self._outer.momentum > 0:
            for name, parameter in self._all:
                # As the parameter lies on the ranks; a stage of another rank is on the meta device here.
                part = own[name] if name in own else torch.empty_like(own_part(parameter), requires_grad=False)
                momentum[name] = gradient_of(parameter, part)
        return {"num_rounds": self._num_rounds, "momentum": momentum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, with a new round that begins at the parameters of the next step.

        Called by: every rank, with the same state; :meth:`rankwise.Checkpointer.restore` does. A mean that is on its
        way and the rest of earlier compression are dropped, so load the model's parameters too, the same everywhere.

        Raises:
            ConfigurationError: it belongs to another model, or another outer optimizer.
        """
        momentum = cast("Mapping[str, torch.Tensor]", state.get("momentum", {}))
        of_all = self._all if self._outer is not None and self._outer.momentum > 0 else []
        shapes = {name: parameter.shape for name, parameter in of_all}
        found = {name: value.shape for name, value in momentum.items()}
        if found != shapes:
            other = next((name for name in found if name in shapes and found[name] != shapes[name]), None)
            raise ConfigurationError(
                f"This state does not belong to the outer optimizer of {self._name}.",
                evidence=f"it holds the momentum of {len(found)} parameters; this model has {len(shapes)} with momentum"
                if other is None
                else f"its momentum of {other} is {list(found[other])}; here it is {list(shapes[other])}",
                do="pass the same outer= and the same model as when it was saved",
            )
        if self._changes is not None:
            if self._ends is not None:
                self._changes.finish()
            self._changes.forget()
        with torch.no_grad():
            for (name, _), own in zip(self._own, self._momentum, strict=False):
                own.copy_(own_part(momentum[name]))
        self._ends = None
        self._num_rounds = int(state["num_rounds"])
        self._num_steps = 0
        self._counter.end_round()
        self._has_anchors = self._is_begun = False
        self._is_settled = True
