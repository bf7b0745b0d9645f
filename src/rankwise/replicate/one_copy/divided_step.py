# SPDX-License-Identifier: Apache-2.0
"""Whether the ranks of a host share one copy of a model; then each step is divided: a rank updates what it owns.

Around each step the ranks meet twice: before it, when none of them reads the parameters any more; and after it, when
all are updated. A step that a rank leaves out, or takes of another optimizer, is an error on every rank; so is a
difference between ranks, of which a part would be lost. Built on hooks of an optimizer, innermost, so that other hooks
see all parameters before and after.

A step is taken by all ranks of the host or by none: it counts once all have reached the meeting after it. If a rank
fails before that, each of the others goes back to the values that the owners recorded before the first meeting, and
shares no more.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.autograd.graph import increment_version

from rankwise.comm.agreement import same_on_all_ranks
from rankwise.comm.backends.mapping import PAGE_BYTES
from rankwise.comm.backends.shared_memory import SharedMemory
from rankwise.comm.same_state import CheckSchedule, Posted
from rankwise.comm.step_hooks import Follower, Phase, ask_again, closure_of, follow, with_closure
from rankwise.errors import CollectiveMismatch, ConfigurationError, RankwiseError, ReplicasDiffer, fold_values
from rankwise.log import log
from rankwise.replicate.one_copy.agreed_meeting import AgreedMeeting
from rankwise.replicate.one_copy.fused_update import FusedUpdates
from rankwise.replicate.one_copy.lost_state import lose_state
from rankwise.replicate.one_copy.shared_parameters import (
    KINDS,
    Division,
    ParameterLayout,
    SharedParameters,
    checksum_of,
    details_of,
    hash_of,
    why_not_shared,
)
from rankwise.replicate.one_copy.shared_state import SharedState
from rankwise.replicate.state_guard.guard import VALUES_EVERY
from rankwise.torch_private.compiler import uncompiled
from rankwise.torch_private.modules import put_innermost
from rankwise.torch_private.step_guard import guard_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.optim.optimizer import Optimizer
    from torch.utils.hooks import RemovableHandle

    from rankwise.comm.backends.engine import HostMemory
    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.session import Session
    from rankwise.replicate.gradient_sync import GradientSync

INDEPENDENT = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor",
)  # fmt: skip
"""Optimizers of torch.optim whose update of a parameter depends on that parameter alone."""
_BEFORE, _AFTER, _COMPARE = 0, 1, 2
"""Parts of a step: ranks that meet are in the same one."""


class DividedSteps(Follower):
    """The steps of this process's optimizers, from the first model with one copy per host until the world is left."""

    def __init__(self, session: Session, exchange: SharedMemory, memory: HostMemory, posted: Posted) -> None:
        self._process = session.process
        self.exchange = exchange
        self._models: WeakKeyDictionary[nn.Module, SharedParameters] = WeakKeyDictionary()
        self._divided: WeakKeyDictionary[Optimizer, DividedOptimizer] = WeakKeyDictionary()
        self.meeting = AgreedMeeting(memory, PAGE_BYTES, self._error_of_skipped_step)
        self.posted = posted
        self._num_backwards = 0
        self._num_optimizers = 0
        self._awaited = ""
        self._unfollow = follow(self, Phase.DIVIDE)
        here = ref(self)

        def failed(optimizer: Optimizer, error: BaseException) -> None:
            steps = here()
            if steps is not None:
                steps.note_failure(optimizer, error)

        kinds = [kind for name in INDEPENDENT if (kind := getattr(torch.optim, name, None)) is not None]
        self._unguard = guard_steps(kinds, failed)
        session.at_end(self.end)

    def add(self, model: nn.Module, parameters: SharedParameters) -> None:
        """Divide the steps of the optimizers of a model's parameters."""
        self._models[model] = parameters
        ask_again()

    def note_backward(self) -> None:
        """Note that a backward begins that synchronizes, as often as on every other rank."""
        self._num_backwards += 1
        self.meeting.note_progress(self._num_backwards)

    def models_of(self, parameters: Sequence[torch.Tensor]) -> list[SharedParameters]:
        """Return the models that have some of the parameters, and still share them."""
        held = {id(parameter) for parameter in parameters}
        return [one for one in self._models.values() if one.is_shared and not held.isdisjoint(one.number_of)]

    def concerns(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer updates a model here."""
        return optimizer in self._divided or bool(self.models_of(_parameters_of(optimizer)))

    def before_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        """Have the steps of an optimizer be divided. Called before other hooks of the optimizer."""
        if os.getpid() != self._process:
            return
        divided = self._divided.get(optimizer)
        if divided is None:
            reason = why_not_divided(optimizer)
            if reason:
                self.give_up(reason)
                return
            self._num_optimizers += 1
            divided = self._divided[optimizer] = DividedOptimizer(optimizer, self, self._num_optimizers)
        divided.put_hooks_innermost()

    def give_up(self, reason: str) -> None:
        """Give this rank its own copy of every model and of the state of every optimizer.

        Called by: every rank of the host, before the same step.

        Raises:
            ConfigurationError: a model was to have one copy per host whatever happens.
        """
        models = [one for one in self._models.values() if one.is_shared]
        for model in models:
            if model.is_wanted:
                raise ConfigurationError(
                    f"{model.model_name} cannot have one copy per host any more: {reason}.",
                    do="leave one_copy_per_host out, or pass one_copy_per_host=False",
                )
        log(f"every rank has its own copy of the parameters from now on: {reason}")
        for optimizer, divided in self._divided.items():
            divided.take_own_copy(optimizer)
        for model in models:
            model.take_own_copy()
        ask_again()

    def _error_of_skipped_step(self, rank: int) -> RankwiseError:
        return CollectiveMismatch(
            f"Rank {rank} left out a step of the optimizer that the other ranks take.",
            evidence=f"it has begun the next backward, and does not come to {self._awaited}",
            do="decide on every rank alike whether to step: by rankwise.all_reduce of what the decision depends on",
        )

    def synchronize(self, what: str, numbers: Sequence[int]) -> list[list[int]]:
        """Wait for the other ranks of the host, at the same place; return the numbers of all."""
        self._awaited = what
        return self.meeting.meet(what, numbers)

    def note_failure(self, optimizer: Optimizer, error: BaseException) -> None:
        """Share no more if a step has raised that this rank had begun. Called by the guard of steps, and in a step."""
        divided = self._divided.get(optimizer)
        if divided is None or not divided.is_open or os.getpid() != self._process:
            return
        note = self._share_no_more()
        if note:
            error.add_note(note)

    def _share_no_more(self) -> str:
        """Leave every optimizer and parameter to this rank alone; return what that has undone."""
        notes = [divided.end(optimizer) for optimizer, divided in list(self._divided.items())]
        # No rank updates them any more: that takes a meeting of all.
        for model in self._models.values():
            model.keep_view()
        self._divided.clear()
        ask_again()
        return " ".join(filter(None, notes))

    def end(self) -> None:
        """Leave every optimizer and parameter to this rank alone. Called when the world is left, in any way."""
        self._unfollow()
        self._unguard()
        self._share_no_more()


class DividedOptimizer:
    """The steps of one optimizer.

    Its many fields are what it is divided into, and how far the step under way has come, for whatever ends it.
    """

    def __init__(self, optimizer: Optimizer, steps: DividedSteps, number: int) -> None:
        self._optimizer = ref(optimizer)
        self._steps = steps
        self._number = number
        self._state = SharedState()
        self._num_steps = 0
        self._is_loaded = True
        """Whether the state is not from a divided step."""
        self._due = CheckSchedule(0, VALUES_EVERY)
        self._division = Division.of(optimizer, [])
        self._is_begun = False
        """Whether the optimizer has only what this rank owns."""
        self._fused = FusedUpdates()
        self._had_state = False
        self._is_state_whole = True
        """Whether this rank has the state of all parameters."""
        self._unshared_before: list[torch.Tensor] = []
        """Values of parameters that are in no model with one copy, to undo the step under way."""
        self._first_meeting = self._last_meeting = 0
        """Of the step under way: the numbers of the meetings before and after it; 0 where it has not come to it."""
        self._what = f"the step of optimizer {number} ({type(optimizer).__name__})"
        self._hooks: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_load_state_dict_post_hook(self._note_load),
        ]

    def put_hooks_innermost(self) -> None:
        """Run after all hooks before the step, and before all hooks after it."""
        optimizer = self._optimizer()
        if optimizer is not None and self._hooks:
            put_innermost(optimizer, self._hooks[0], self._hooks[1])

    def _note_load(self, _optimizer: Optimizer) -> None:
        self._is_loaded = True

    # -- before the step ---------------------------------------------------------------------------

    @uncompiled
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin the update, after the closure if there is one. Called by torch."""
        closure = closure_of(args, kwargs)
        if closure is None:
            self._begin(optimizer)
            return None

        def and_begin() -> object:
            with torch.enable_grad():
                loss = closure()
            self._begin(optimizer)
            return loss

        return with_closure(args, kwargs, and_begin)

    @torch.no_grad()
    def _begin(self, optimizer: Optimizer) -> None:
        if self.is_open:
            # Between the update and its hooks, where an interrupt is not noticed.
            error = RankwiseError(
                f"The last step of {type(optimizer).__name__} was interrupted and not completed.",
                do="load a checkpoint after an error in optimizer.step(), or let it end the training",
            )
            self._steps.note_failure(optimizer, error)
            raise error
        if not self._division.is_of(optimizer) or not self._division.models:
            self._division = Division.of(optimizer, self._steps.models_of(_parameters_of(optimizer)))
        if not self._division.models:
            return
        try:
            self._open(optimizer)
        except BaseException as error:
            self._steps.note_failure(optimizer, error)
            raise

    def _open(self, optimizer: Optimizer) -> None:
        """Meet the other ranks, compare with them, and divide the step."""
        models = self._division.models
        moved = next((f"{name} of {model.model_name}" for model in models if (name := model.moved())), "")
        numbers = [model.written() for model in models]
        is_due = self._num_steps >= self._due.next
        digests = [
            hash_of(moved),
            checksum_of(_named(models, numbers)),
            checksum_of(_gradients(models)) if is_due else 0,
            checksum_of(_state(optimizer, models)) if self._is_loaded else 0,
        ]
        self._had_state = digests[-1] != 0 if self._is_loaded else self._state.has_tensors
        for model, of_model in zip(models, numbers, strict=True):
            model.record(of_model)
        self._unshared_before = [one.detach().clone() for one in self._division.unshared]
        self._first_meeting = self._steps.meeting.number + 1
        rows = self._synchronize(_BEFORE, digests)
        error = self._difference(rows, moved, optimizer, models)
        if error is not None:
            # No rank begins the step.
            self._first_meeting = 0
            raise error
        if moved:
            self._first_meeting = 0
            self._steps.give_up(f"{moved} was given other memory")
            return
        for model, of_model in zip(models, numbers, strict=True):
            if of_model:
                model.publish(of_model)
        self._state.forget_writes()
        if is_due:
            self._due.advance(self._num_steps)
        self._num_steps += 1
        self._divide(optimizer)

    def _synchronize(self, phase: int, numbers: Sequence[int]) -> list[list[int]]:
        """Wait for the other ranks of the host, at the same part of the same step; return the numbers of all.

        Raises:
            CollectiveMismatch: another rank is at another step; on every rank.
        """
        rows = self._steps.synchronize(self._what, [4 * self._number + phase, *numbers])
        if len({row[0] for row in rows}) > 1:
            # All ranks raise this: none begins a step, or counts one as taken.
            self._first_meeting, self._last_meeting = (0, 0) if phase == _BEFORE else (self._first_meeting, 0)
            raise CollectiveMismatch(
                "The ranks of a host take steps of different optimizers.",
                evidence=f"this rank is at {self._what}",
                do="step the same optimizers in the same order on every rank",
            )
        return [row[1:] for row in rows]

    def _difference(
        self, rows: Sequence[Sequence[int]], moved: str, optimizer: Optimizer, models: Sequence[SharedParameters]
    ) -> ReplicasDiffer | None:
        """Return an error if ranks would not do the same; the same one on every rank of the host."""
        if len({row[0] for row in rows}) > 1:
            return ReplicasDiffer(
                "A parameter was given other memory on some ranks of a host only.",
                evidence=f"on this rank: {moved or 'none'}",
                do="change parameters on every rank alike",
            )
        tables = (
            partial(_named, models),
            partial(_gradients, models),
            partial(_state, optimizer, models),
        )
        for column, (kind, tensors) in enumerate(zip(KINDS, tables, strict=True), 1):
            if len({row[column] for row in rows}) > 1:
                held = self._steps.posted.gather(details_of(tensors()), partial(self._synchronize, _COMPARE, []))
                error = kind.difference(held, self._what)
                if error is not None:
                    return error
        return None

    def _divide(self, optimizer: Optimizer) -> None:
        """Leave the optimizer what this rank owns."""
        division = self._division
        # First of all: an interrupt may come between any two lines.
        self._is_begun = True
        self._fused.begin(optimizer, division.unshared)
        for group, own in zip(optimizer.param_groups, division.own_groups, strict=True):
            group["params"] = own
        if self._is_loaded:
            self._is_state_whole = False
            self._fused.forget()
            for parameter in division.of_others:
                optimizer.state.pop(parameter, None)
        for model, numbers in zip(division.models, division.numbers, strict=True):
            model.open_for_update(numbers)

    # -- after the step ----------------------------------------------------------------------------

    @uncompiled
    @torch.no_grad()
    def _after(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        """End the update. Called by torch."""
        if not self._is_begun:
            return
        try:
            self._restore(optimizer)
            is_new = self._state.share_new(optimizer, self._division.own, self._division.parameters)
            self._last_meeting = self._steps.meeting.number + 1
            rows = self._synchronize(_AFTER, [int(is_new or self._is_loaded)])
            if any(row[0] for row in rows):
                self._share_state(optimizer)
        except BaseException as error:
            self._steps.note_failure(optimizer, error)
            raise
        self._first_meeting = self._last_meeting = 0
        self._unshared_before = []
        self._is_loaded = False
        increment_version([parameter for parameter in self._division.of_others if parameter.grad is not None])

    def _share_state(self, optimizer: Optimizer) -> None:
        self._is_state_whole = False
        reasons = self._state.extend(optimizer, self._division.own, self._steps.exchange)
        if reasons:
            raise ConfigurationError(
                f"There is too little shared memory for the state of {type(optimizer).__name__}.",
                evidence=fold_values(reasons),
                do="give the machine or container more memory: without one copy, every rank would need as much",
            )
        self._synchronize(_COMPARE, [])
        self._state.show_others(optimizer, self._division.parameters)
        self._is_state_whole = True

    def _restore(self, optimizer: Optimizer) -> None:
        if not self._is_begun:
            return
        division = self._division
        for group, parameters in zip(optimizer.param_groups, division.groups, strict=True):
            group["params"] = parameters
        self._fused.end()
        for model, numbers in zip(division.models, division.numbers, strict=True):
            model.close_after_update(numbers)
        self._is_begun = False

    # -- the end -----------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a step is under way: this rank is about to meet the others before it, or has, and not yet after."""
        return self._first_meeting > 0

    def take_own_copy(self, optimizer: Optimizer) -> None:
        """Give this rank its own copy of the state."""
        self._fused.forget()
        self._state.take_own_copy(optimizer, _parameters_of(optimizer))

    @torch.no_grad()
    def end(self, optimizer: Optimizer) -> str:
        """Leave the optimizer to this rank alone, its parameters as before the step under way or as after it.

        Returns:
            What has been undone, in words.
        """
        self._restore(optimizer)
        note = ""
        is_undone = self._is_unfinished()
        if is_undone:
            for model in self._division.models:
                model.undo()
            for parameter, before in zip(self._division.unshared, self._unshared_before, strict=True):
                parameter.copy_(before)
            note = f"{self._what} was undone: the parameters are those from before it."
            self._is_state_whole = False
        while self._hooks:
            self._hooks.pop().remove()
        parameters = _parameters_of(optimizer)
        self._state.keep_view(optimizer, parameters)
        if not self._is_state_whole and (self._had_state or (not is_undone and any(optimizer.state.values()))):
            lose_state(optimizer, parameters, self._what)
            note += " The state of the optimizer is lost: load a checkpoint before the next step."
        elif not self._is_state_whole:
            for parameter in parameters:
                optimizer.state.pop(parameter, None)
        self._first_meeting = self._last_meeting = 0
        return note.strip()

    def _is_unfinished(self) -> bool:
        """Return whether some rank may have begun the step under way, and it does not count as taken."""
        meeting = self._steps.meeting
        if not self._first_meeting or not meeting.took_place(self._first_meeting):
            return False
        return not self._last_meeting or not meeting.took_place(self._last_meeting)


def why_not_divided(optimizer: Optimizer) -> str:
    """Return why the steps of an optimizer cannot be divided; empty if they can."""
    kind = type(optimizer)
    if not any(kind is getattr(torch.optim, name, None) for name in INDEPENDENT):
        return f"{kind.__name__} may update a parameter by others"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"the steps of {kind.__name__} are differentiated"
    return ""


def _named(
    models: Sequence[SharedParameters], numbers: Sequence[Sequence[int]] | None = None
) -> dict[str, torch.Tensor]:
    """Return parameters by their names in messages: of each model those with the numbers, or all."""
    found: dict[str, torch.Tensor] = {}
    for position, model in enumerate(models):
        found |= model.named(None if numbers is None else numbers[position])
    return found


def _gradients(models: Sequence[SharedParameters]) -> dict[str, torch.Tensor]:
    return {name: one.grad for name, one in _named(models).items() if one.grad is not None}


def _state(optimizer: Optimizer, models: Sequence[SharedParameters]) -> dict[str, torch.Tensor]:
    return {
        f"{name} ({key})": value
        for name, parameter in _named(models).items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# -- whether ranks share one copy ---------------------------------------------------------------------

LEAST_BYTES = 2**19
"""For smaller models the ranks would spend more time on meeting than they save."""


def share_parameters(
    model: nn.Module, sync: GradientSync, exchange: Exchange, session: Session, *, wanted: bool | None, obstacle: str
) -> None:
    """Have the ranks of each host share one copy of a model's parameters, which are equal on all ranks.

    Called by: every rank of ``exchange``.

    Args:
        model: that has them.
        sync: of its gradients.
        exchange: of the ranks that hold copies.
        session: of this rank.
        wanted: ``False``: do not; ``True``: do, or raise; ``None``: do so where it is possible and worth it.
        obstacle: why another part of the call makes it impossible, or empty.

    Raises:
        ConfigurationError: ``wanted`` is true, and it is impossible; or it differs between ranks.
    """
    same_on_all_ranks(
        "one_copy_per_host", str(wanted), do="pass the same one_copy_per_host= on every rank", error=ConfigurationError
    )
    num_bytes = sum(parameter.nbytes for parameter in sync.parameters)
    if wanted is False or (wanted is None and num_bytes < LEAST_BYTES):
        return
    reason = obstacle or why_not_shared(sync.names, sync.parameters)
    if not reason and not isinstance(exchange, SharedMemory):
        reason = "the ranks do not exchange through shared memory"
    if not reason and isinstance(exchange, SharedMemory):
        reason = _share(model, sync, exchange, session, is_wanted=wanted is True)
    if reason and wanted:
        raise ConfigurationError(
            f"one_copy_per_host=True is impossible for this {type(model).__name__}: {reason}.",
            do="leave one_copy_per_host out",
        )


def stop_sharing(parameters: Sequence[nn.Parameter], session: Session) -> None:
    """Give every rank its own copy, if the ranks of a host share some of these parameters.

    Called by: every rank of the host.
    """
    steps = session.made(_steps_of)
    if steps is not None and steps.models_of(parameters):
        steps.give_up("a model has changed")


def _share(model: nn.Module, sync: GradientSync, exchange: SharedMemory, session: Session, *, is_wanted: bool) -> str:
    """Share them; return why it is impossible, or nothing."""
    most = max(map(len, exchange.hosts))
    if most == 1:
        return "no host has more than one rank"
    own_host = _own_host(exchange)
    layout = ParameterLayout.of(sync.parameters, len(own_host), PAGE_BYTES)
    memory, reasons = exchange.host_memory(sum(layout.record), layout.parts_of(own_host.index(exchange.rank)))
    if memory is None:
        return "there is too little shared memory\n" + fold_values(reasons)
    steps = session.once(_steps_of)
    if steps is None or memory.mapping.private is None:
        return "this system does not tell which pages a process has written"
    name = type(model).__name__
    shared = SharedParameters(name, sync.names, sync.parameters, memory, layout, is_wanted=is_wanted)
    steps.synchronize(f"one_copy_per_host of {name}", [])
    shared.show()
    steps.add(model, shared)
    sync.report_backwards_to(steps.note_backward)
    size = f"{layout.end / 2**20:.1f} MiB for up to {most} ranks, and as much to undo a step"
    log(f"{name}: one copy of the parameters per host, {size}")
    return ""


def _steps_of(session: Session) -> DividedSteps | None:
    exchange = session.exchange
    if not isinstance(exchange, SharedMemory):
        return None
    memory, _ = exchange.host_memory(PAGE_BYTES + AgreedMeeting.num_bytes(len(_own_host(exchange))), [])
    if memory is None:
        return None
    posted = Posted.of(session, f"rankwise/one_copy/{memory.ranks[0]}", memory.ranks)
    return None if posted is None else DividedSteps(session, exchange, memory, posted)


def _own_host(exchange: SharedMemory) -> list[int]:
    return next(ranks for ranks in exchange.hosts if exchange.rank in ranks)
