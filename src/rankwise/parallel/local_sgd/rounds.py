# SPDX-License-Identifier: Apache-2.0
"""The rounds of one model: when worker groups exchange what they changed, and when that is applied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch

from rankwise.comm.session import current_or_none
from rankwise.errors import ConfigurationError
from rankwise.health.diagnosis import world_left
from rankwise.log import warn
from rankwise.parallel.core.gradient_buckets import gradient_of
from rankwise.parallel.local_sgd.outer import step_outer
from rankwise.parallel.local_sgd.step_counter import follow_steps
from rankwise.torch_private import foreach
from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn
    from torch.optim import Optimizer

    from rankwise.comm.session import Session
    from rankwise.parallel.local_sgd.buffers import MeanBuffers
    from rankwise.parallel.local_sgd.outer import DiLoCo
    from rankwise.parallel.local_sgd.pseudo_gradient import PseudoGradients


class WeighsSteps(Protocol):
    """What says how much the steps of a worker group count."""

    def report_mean_to(self, listener: Callable[[float], None]) -> None:
        """Call ``listener`` at the end of backward with what gradients are the mean over, on the worker group."""
        ...


_MANY = 100
"""So many backward passes come before a first step nowhere but where steps cannot be counted."""


def exchanged(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters, by name, of which this rank has something to exchange."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [(name, p) for name, p in trained if not (part := own_part(p)).is_meta and part.numel()]


class LocalSGD:
    """The rounds of a model, from :func:`rankwise.local_sgd` until the model is gone or the world is left.

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
        buffers: MeanBuffers | None,
        meet: Callable[[str], None] | None,
    ) -> None:
        """See :func:`rankwise.local_sgd`, which calls it.

        Args:
            model: through its strategy already, the same on all worker groups.
            session: the open one.
            trained: says what steps stood for.
            every: steps of a round.
            overlap: steps of the next round before what comes of a round is applied.
            outer: ``None`` for the plain mean.
            changes: the channels between worker groups; ``None`` where there is one worker group.
            buffers: what averages buffers; ``None`` as for ``changes``.
            meet: returns when all worker groups came to what its argument says; ``None`` as for ``changes``.
        """
        self._session = session
        self._name = type(model).__name__
        self._every = every
        self._overlap = overlap
        self._outer = outer
        self._changes = changes
        self._buffers = buffers
        self._meet = meet
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self._all = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._own = exchanged(model)
        parts = [own_part(parameter).detach() for _, parameter in self._own]
        self._anchors = [torch.empty_like(part) for part in parts]
        has_momentum = outer is not None and outer.momentum > 0
        self._momentum = [torch.zeros_like(part) for part in parts] if has_momentum else []
        self._ends: list[torch.Tensor] | None = None
        """What the parameters were when the round ended whose result is under way; ``None`` where none is."""
        self._has_anchors = False
        self._num_rounds = 0
        self._num_steps = 0
        self._is_begun = False
        """Whether a step was begun since the latest round ended, of whichever optimizer."""
        self._is_settled = True
        """Whether nothing has changed since all worker groups were the same."""
        self._weight = 0.0
        """Samples of the round so far."""
        self._num_backward = 0
        self._fresh = 0.0
        """Samples of the gradients since the last step."""
        self._are_fresh_used = False
        self._used: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """How many backward passes there were when an optimizer made its last step."""
        self._has_stepped = False
        trained.report_mean_to(self._note_mean)
        self._ids = {id(parameter) for _, parameter in self._all}
        self._stop_following = follow_steps(self, [parameter for _, parameter in self._all], patience=every)
        synchronize, leave = WeakMethod(self.synchronize), ref(self)
        session.before_save(lambda: None if (call := synchronize()) is None else call())
        session.on_leave(lambda: None if (one := leave()) is None else one._leave())  # noqa: SLF001 - its own

    @property
    def every(self) -> int:
        """Optimizer steps of a round."""
        return self._every

    @property
    def num_rounds(self) -> int:
        """Rounds that ended so far, those before a resume among them."""
        return self._num_rounds

    def synchronize(self) -> None:
        """End a round now: afterwards parameters and buffers are the same on all worker groups.

        Called by: every rank. At the end of training, and before evaluating; a save calls it by itself.

        What is under way is applied first; then the steps since are averaged, as at the end of a round. Statistics of
        BatchNorm, and other buffers of floating-point numbers, become their mean over the worker groups. Does nothing
        where no step was made since the last time.

        Raises:
            ConfigurationError: the world was left.
            CollectiveMismatch: worker groups have made different numbers of steps.
            PeerFailed: another rank failed.
        """
        if current_or_none() is not self._session:
            raise ConfigurationError(
                "synchronize() was called after leaving the world that local_sgd() was called in.",
                do="call outer.synchronize() before the end of `with rankwise.join():`",
            )
        self._warn_if_never_stepped()
        if self._meet is not None:
            more = " and a part of one" if self._is_begun and not self._num_steps else ""
            self._meet(
                f"synchronize() of local_sgd({self._name}) after {self._num_rounds} rounds and {self._num_steps} steps"
                f"{more}"
            )
        if self._is_settled:
            return
        self._apply()
        if self._is_begun:
            self._send(overlapping=False)
            self._apply()
        if self._buffers is not None:
            self._buffers.average()
        self._is_settled = True
        # The next round begins at what the parameters are then: all worker groups may load others before.
        self._has_anchors = False

    # -- what backward and optimizers tell -----------------------------------------------------------

    def _note_mean(self, weight: float) -> None:
        """Note what gradients became the mean of."""
        self._num_backward += 1
        self._weight += weight
        # Several optimizers may use the same gradients.
        self._fresh = weight if self._are_fresh_used else self._fresh + weight
        self._are_fresh_used = False
        if self._num_backward == max(self._every, _MANY):
            self._warn_if_never_stepped()

    def _warn_if_never_stepped(self) -> None:
        if not self._has_stepped and self._num_backward and current_or_none() is self._session:
            self._has_stepped = True  # said once
            warn(
                f"{self._num_backward} backward passes of {self._name} ran without a step of an optimizer that holds "
                "its parameters: no round of local_sgd() ends, and the islands are not averaged; use a "
                "torch.optim.Optimizer, created with the current parameters of the model"
            )

    def before_step(self) -> None:
        """Note where a first round begins. Called before each step of an optimizer of the model.

        Raises:
            NotJoined: this is another world than that of :func:`rankwise.local_sgd`.
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
            # Nothing may be waited for until the end of a long round.
            raise detector.error
        self._is_settled, self._is_begun, self._has_stepped = False, True, True
        if not self._has_anchors:
            # Not earlier: weights may have been loaded since local_sgd().
            for anchor, part in zip(self._anchors, self._parts(), strict=True):
                anchor.copy_(part)
            self._has_anchors = True

    def before_update(self, optimizer: Optimizer) -> None:
        """Have an optimizer pass by gradients of no samples; raise where nobody knows of how many they are."""
        is_known = self._num_backward > self._used.get(optimizer, 0)
        if is_known and self._fresh > 0:
            return
        own = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._ids]
        if is_known:
            # Nothing was learnt: also no decay, and no momentum of earlier steps.
            for parameter in own:
                parameter.grad = None
        elif any(parameter.grad is not None for parameter in own):
            raise ConfigurationError(
                f"optimizer.step() found gradients of {self._name} that no backward() since the last step computed, "
                "so their weight among the islands is unknown.",
                do="call backward() before each step, instead of torch.autograd.grad(); with several microsteps, run "
                "the last one outside rankwise.no_sync(model)",
            )

    def after_update(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has used the gradients there are."""
        self._used[optimizer] = self._num_backward
        self._are_fresh_used = True

    def after_step(self) -> None:
        """Count a step, and do what is due after it. Called after each step of the optimizer that counts."""
        if current_or_none() is not self._session:
            return
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
        """End a round: send what it changed, and begin the next, before the mean is applied if ``overlapping``."""
        unfrozen = next((p for p in self._frozen if p.requires_grad), None)
        if unfrozen is not None:
            raise ConfigurationError(
                f"A layer of {self._name} was unfrozen after local_sgd(), so its changes would not reach the other "
                "islands.",
                evidence=f"a parameter of shape {list(unfrozen.shape)} now requires gradients",
                do="unfreeze layers before local_sgd(), and add their parameters to the optimizer when they are to be "
                "trained",
            )
        parts = self._parts()
        if self._changes is not None:
            self._changes.send(self._anchors, parts, self._weight)
        self._weight = 0.0
        self._ends = [part.clone() for part in parts] if overlapping else parts
        self._num_steps = 0
        self._is_begun = False
        self._num_rounds += 1

    @torch.no_grad()
    def _apply(self) -> None:
        """Let the outer optimizer make its step, if a round is under way; what was trained since stays on top of it."""
        parts, ends, self._ends = self._parts(), self._ends, None
        if ends is None:
            return
        if self._changes is not None:
            changes = self._changes.take()
        elif self._outer is not None:
            changes = [anchor - end for anchor, end in zip(self._anchors, ends, strict=True)]
        else:
            return  # the mean of one worker group is what it is
        if parts:
            step_outer(self._outer, self._anchors, changes, self._momentum)
            if self._is_begun:
                foreach.sub_(parts, ends)
                foreach.add_(parts, self._anchors)
            else:
                # Also where a worker group has numbers that are none, of which no difference is zero.
                foreach.copy_(parts, self._anchors)

    def _leave(self) -> None:
        """Let nothing be under way when the world is left."""
        self._warn_if_never_stepped()
        if self._ends is not None and self._changes is not None:
            self._changes.finish()
        if not self._is_settled and self._changes is not None:
            warn(
                f"the world ends with steps of {self._name} that the islands have not exchanged, so its parameters "
                "differ between them; call outer.synchronize() at the end of training"
            )

    # -- state ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what the outer optimizer remembers, as of the last round that was applied.

        Belongs to parameters, so that it loads on any number of worker groups. Call :meth:`synchronize` first, as a
        save does: what the worker groups have not yet exchanged is not in it.
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
        """Go on from a saved state, with a new round that begins at the parameters as they will be at the next step.

        Called by: every rank, with the same state; :meth:`rankwise.Checkpointer.restore` does. What is under way is
        dropped, and what compressing left out, so load the model's parameters too, on every worker group the same.

        Raises:
            ConfigurationError: it is of another model, or of another outer optimizer.
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
        self._weight = 0.0
        self._has_anchors = self._is_begun = False
        self._is_settled = True
