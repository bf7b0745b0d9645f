# SPDX-License-Identifier: Apache-2.0
"""When backward runs and when an optimizer steps: the only wrap of torch's backward, and its only hooks on all steps.

Followers of steps are called in one order, whenever they began to follow:

1. Before a step: the meter of steps, then followers by their phase, then in the order in which they began.
2. The script's hooks on the optimizer; a closure runs inside the step. The update that ranks of a host divide is
   innermost: after these hooks before the step, and before them after it.
3. After a step: the meter, then followers in the same order as before it.

A backward passes the meter, then what reads its losses. torch lets hooks go no other way between the call of backward
and its first node, and during backward the tensors that losses saved are freed. The script's hooks on all optimizers
come before all of this if they are older than the latest follower.
"""

from __future__ import annotations

import threading
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rankwise import meter
from rankwise.meter import BACKWARD, OPTIMIZER, SCRIPT
from rankwise.torch_private.compiler import between_graphs, skipped

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle

    Arguments = tuple[tuple[Any, ...], dict[str, Any]]
    """Of a step: those by position, of which the optimizer is the first, and those by name."""


class Phase(IntEnum):
    """In which order followers are called, before a step and after it."""

    WATCH = 0
    """The launcher and ``rankwise verify``, from before the script on."""
    FIRST_STEP = 1
    """Do the ranks train one model?"""
    DIVIDE = 2
    """One copy per host."""
    MODEL = 3
    """What strategies note of a model's steps."""


class Follower:
    """What is called around the steps of the optimizers that concern it."""

    def concerns(self, optimizer: Optimizer, /) -> bool:
        """Return whether to follow an optimizer. Asked at its first step, and again if the answer may have changed.

        That is: if it has other groups, if others follow, and after :func:`ask_again`.
        """
        del optimizer
        return True

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Arguments | None:
        """Prepare for a step; return other arguments for it, or ``None``."""

    def after_step(self, optimizer: Optimizer, /) -> None:
        """Note that a step was taken."""


class _Entry(NamedTuple):
    phase: Phase
    follower: Callable[[], Follower | None]


class _Followed(NamedTuple):
    """An optimizer that has stepped, how many groups it had, and its followers."""

    optimizer: ref[Optimizer]
    num_groups: int
    before: list[Callable[[], Follower | None]]
    after: list[Callable[[], Follower | None]]


_entries: list[_Entry] = []
"""By phase."""
_known: dict[int, _Followed] = {}
"""By the identity of the optimizer: a lookup in a dict with weak keys takes several times as long."""
_handles: list[RemovableHandle] = []


class _StepsOfThread(threading.local):
    """The steps that this thread is in: some step in backward, and some call another optimizer's."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, _Followed]] = []
        """In which part of the step each has begun, and its followers."""


_here = _StepsOfThread()
_AT_IMPORT: Callable[..., None] = torch.autograd.backward
_torchs_backward: Callable[..., None] | None = None
"""What was there in place of :func:`_backward`, while that is in place."""
_around: Callable[..., None] | None = None


def follow(follower: Follower, phase: Phase, *, is_kept: bool = False) -> Callable[[], None]:
    """Call ``follower`` around steps, as long as it lives, or as the process does with ``is_kept``.

    Returns:
        A function that ends this.
    """
    entry = _Entry(phase, (lambda: follower) if is_kept else ref(follower))
    _entries[:] = sorted((*_living(), entry), key=lambda one: one.phase)
    ask_again()
    _put_hooks_last()

    def end() -> None:
        if entry in _entries:
            _entries.remove(entry)
        ask_again()

    return end


def ask_again() -> None:
    """Ask followers again which optimizers concern them, each before its next step."""
    _known.clear()


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the closure among the arguments of a step."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]) -> Arguments:
    """Return the arguments of a step with another closure in place of theirs."""
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}


def put_around_backward(around: Callable[..., None] | None) -> bool:
    """Call ``around(backward, tensors, ...)`` in place of each backward, until :func:`uninstall` after ``None``.

    Returns:
        Whether it was not there before.
    """
    global _around
    before, _around = _around, around
    install()
    return before is not around


def is_updating() -> bool:
    """Return whether an optimizer's step is under way, which may call the model itself in a closure."""
    return bool(_here.begun)


def install() -> None:
    """Follow steps and backward from now on, for the meter and for what is put around backward."""
    global _torchs_backward  # noqa: PLW0603 - one for the process, as torch's function is
    _put_hooks_last()
    if _torchs_backward is None:
        _torchs_backward = torch.autograd.backward
        torch.autograd.backward = _backward


def uninstall() -> None:
    """Leave backward and steps to torch, except what is still followed. Called when the world has been left."""
    global _torchs_backward
    if not _living():
        _remove_hooks()
    # Another library's wrap of this one stays, with this one in it.
    if _around is None and _torchs_backward is not None and torch.autograd.backward is _backward:
        torch.autograd.backward, _torchs_backward = _torchs_backward, None


def _put_hooks_last() -> None:
    """Have torch call this room after the hooks on all optimizers that there are."""
    _remove_hooks()
    _handles.extend((register_optimizer_step_pre_hook(_before), register_optimizer_step_post_hook(_after)))


def _remove_hooks() -> None:
    while _handles:
        _handles.pop().remove()


def _living() -> list[_Entry]:
    return [entry for entry in _entries if entry.follower() is not None]


def _backward(*args: Any, **kwargs: Any) -> None:
    """Run a backward. Called in place of ``torch.autograd.backward``."""
    part = meter.current.enter(BACKWARD)
    backward = _torchs_backward or _AT_IMPORT  # another library may have kept this function for longer
    try:
        if _around is None:
            backward(*args, **kwargs)
        else:
            _around(backward, *args, **kwargs)
    finally:
        meter.current.resume(part)


@skipped
def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Call the followers. Called by torch before every step."""
    if torch.compiler.is_compiling():
        return _before_between_graphs(optimizer, args, kwargs)
    part = meter.current.enter(OPTIMIZER)
    if part != OPTIMIZER:  # A step that has failed has left its own.
        _here.begun.clear()
    followed = _followed(optimizer)
    _here.begun.append((part, followed))
    given = None
    for follower in followed.before:
        one = follower()
        changed = None if one is None else one.before_step(optimizer, args, kwargs)
        if changed is not None:
            given = args, kwargs = changed
    return given


@skipped
def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the followers. Called by torch after every step."""
    if torch.compiler.is_compiling():
        return _after_between_graphs(optimizer, args, kwargs)
    part, followed = _here.begun.pop() if _here.begun else (SCRIPT, None)
    meter.current.resume(part, has_updated=True)
    known = _known.get(id(optimizer))
    if followed is None or followed is not known or followed.num_groups != len(optimizer.param_groups):
        followed = _followed(optimizer)
    for follower in followed.after:
        one = follower()
        if one is not None:
            one.after_step(optimizer)
    return None


_before_between_graphs, _after_between_graphs = between_graphs(_before), between_graphs(_after)


def _followed(optimizer: Optimizer) -> _Followed:
    known = _known.get(id(optimizer))
    if known is not None and known.optimizer() is optimizer and known.num_groups == len(optimizer.param_groups):
        return known
    for number in [number for number, one in _known.items() if one.optimizer() is None]:
        del _known[number]
    found = _Followed(ref(optimizer), len(optimizer.param_groups), [], [])
    for entry in _entries:
        follower = entry.follower()
        if follower is not None and follower.concerns(optimizer):
            if type(follower).before_step is not Follower.before_step:
                found.before.append(entry.follower)
            if type(follower).after_step is not Follower.after_step:
                found.after.append(entry.follower)
    _known[id(optimizer)] = found
    return found
