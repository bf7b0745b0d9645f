# SPDX-License-Identifier: Apache-2.0
"""Hooks that belong to one model: a copy or a pickle of it is a plain model, without them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from rankwise import meter
from rankwise.comm.step_hooks import is_updating
from rankwise.meter import BACKWARD, EVALUATION, FORWARD, OPTIMIZER, SCRIPT
from rankwise.torch_private.compiler import between_graphs, skipped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

_DOES_NOTHING = (getattr, (nullcontext(), "__exit__"))
"""Pickles as a function of Python's own that takes any arguments and does nothing: files load without rankwise."""


class OwnHook:
    """A hook of a model that a strategy spread; it calls functions in turn, which compiled graphs leave out."""

    def __init__(self, *calls: Callable[..., object]) -> None:
        self._calls = calls

    @skipped
    def __call__(self, *args: Any, **kwargs: Any) -> object:
        """Call the functions, unless torch records the operations of a model for a graph. Called by torch."""
        if torch.compiler.is_compiling():
            return _call_between_graphs(self._calls, args, kwargs)
        result = None
        if not torch.jit.is_tracing():
            for call in self._calls:
                result = call(*args, **kwargs)
        return result

    def __deepcopy__(self, memo: object) -> NoHook:
        return NoHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return _DOES_NOTHING


def _call_in_turn(calls: Sequence[Callable[..., object]], args: Any, kwargs: Any) -> object:
    """Call functions; return the result of the last one."""
    result = None
    for call in calls:
        result = call(*args, **kwargs)
    return result


_call_between_graphs = between_graphs(_call_in_turn)


class NoHook:
    """The hook of a copied model in place of an :class:`OwnHook`, if its class defines how it is copied."""

    def __call__(self, *_: object, **__: object) -> None:
        """Do nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _DOES_NOTHING


def leave_out_of_copies(model: nn.Module) -> None:
    """Leave the :class:`OwnHook` entries of ``model`` out of its copies and pickles, which name no class of rankwise.

    A model whose class defines ``__reduce__`` or ``__reduce_ex__`` is not changed; its copies have hooks that do
    nothing, of no class of rankwise either.
    """
    kind = type(model)
    if kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__:
        vars(model)["__getstate__"] = _PlainState(model)


def remove_own_hooks(model: nn.Module) -> None:
    """Remove the :class:`OwnHook` entries of ``model``, and what kept them out of its copies."""
    vars(model).pop("__getstate__", None)
    tables = {name: table for name, table in vars(model).items() if isinstance(table, dict)}
    for name, table in tables.items():
        for key in [key for key, hook in table.items() if isinstance(hook, OwnHook)]:
            for related in [other for other in tables if other.startswith(name)]:
                tables[related].pop(key, None)


class _PlainState:
    """Replaces a module's ``__getstate__``, which Python looks up on the module itself first.

    Source: object.__reduce_ex__ of Python 3.11, which asks for the attribute and not for the class's.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)  # which holds this

    def __call__(self) -> Any:
        module = self._module()
        state = None if module is None else type(module).__getstate__(module)
        if not isinstance(state, dict):
            return state
        plain = {name: value for name, value in state.items() if value is not self}
        for name, table in state.items():
            own = [key for key, hook in table.items() if isinstance(hook, OwnHook)] if isinstance(table, dict) else []
            # torch keeps further tables for a table of hooks, of the arguments that some take.
            for related in [one for one in plain if own and one.startswith(name)]:
                plain[related] = _without(plain[related], own)
        return plain


def _without(table: dict[Any, Any], keys: list[Any]) -> dict[Any, Any]:
    rest = table.copy()
    for key in keys:
        rest.pop(key, None)
    return rest


def measure_forward(model: nn.Module) -> None:
    """Count the time of each forward pass of ``model`` as such, if this rank measures its steps."""
    if not meter.is_silent():
        model.register_forward_pre_hook(OwnHook(_before_forward), prepend=True)
        model.register_forward_hook(OwnHook(_after_forward), always_call=True)


def _before_forward(*_: object) -> None:
    part = meter.current.enter(FORWARD if torch.is_grad_enabled() else EVALUATION)
    if part == BACKWARD:
        # A checkpoint that computes its part again: that is backward too.
        meter.current.resume(BACKWARD)


def _after_forward(*_: object) -> None:
    if meter.current.part != BACKWARD:
        meter.current.resume(OPTIMIZER if is_updating() else SCRIPT)
