# SPDX-License-Identifier: Apache-2.0
"""Hooks around the calls of a placed model's modules: inputs are moved, weights are fetched.

The hooks after a call also run when it is interrupted. A copy or pickle of the model has no hooks. Imported by place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import torch
from torch.overrides import TorchFunctionMode

from rankwise.errors import ConfigurationError
from rankwise.place.fetch import Fetching, OffloadedPart
from rankwise.replicate.own_hooks import OwnHook
from rankwise.torch_private.compiler import uncompiled
from rankwise.torch_private.kernels import is_innermost, pop_function_mode, push_function_mode
from rankwise.torch_private.modules import unwrapped_call, wrap_call
from rankwise.torch_private.tensors import tree_flatten, tree_leaves, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from rankwise.place.units import Unit

    Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_COPIES = {torch.Tensor.to, torch.Tensor.copy_, torch.Tensor.type_as, torch.Tensor.set_}
"""Calls that take tensors of different devices."""

_IN_PLACE = {"__setitem__", *(f"__i{operator}__" for operator in (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor"
))}  # fmt: skip
"""What Python calls for ``x[i] = y`` and ``x += y``. Every other call that changes ``x`` ends in ``_``."""


def moved(values: Any, device: torch.device) -> Any:
    """Return a tree with its tensors on ``device``; the same tree if they are there already."""
    leaves, spec = tree_flatten(values)
    if all(not isinstance(leaf, torch.Tensor) or leaf.device == device for leaf in leaves):
        return values
    there = [leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return tree_unflatten(there, spec)


class CrossDeviceMode(TorchFunctionMode):
    """Lets the forward of an open module combine tensors of parts on different devices.

    Calls of such a forward (``x + y``, ``torch.cat``) run where the last part ran; calls that change a tensor in place,
    where that tensor is. Inside parts, which have one device, it does nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.is_active = False
        self._inside: list[bool] = []

    def begin(self) -> None:
        """Start looking at calls, when the whole model begins to run."""
        self.end()
        self._inside.clear()
        self.is_active = True
        self.__enter__()

    def end(self) -> None:
        """Stop looking at calls, also after an interrupt."""
        if self.is_active and is_innermost(self):
            self.__exit__(None, None, None)
        self.is_active = False

    def enter_part(self, device: torch.device) -> None:
        """Ignore calls while a part runs on its device."""
        self.device = device
        # Taken off the stack where possible: ignoring a call takes time too.
        is_out = is_innermost(self)
        if is_out:
            pop_function_mode()
        self._inside.append(is_out)

    def leave_part(self) -> None:
        """Look at calls again."""
        if self._inside and self._inside.pop():
            push_function_mode(self)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._inside or func in _COPIES:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            changed = _changed(func, tensors, kwargs)
            # The next part mostly runs on the device of the last one.
            there = self.device if self.device in devices else tensors[0].device
            there = there if changed is None else changed.device
            return func(*moved(args, there), **moved(kwargs, there))
        return func(*args, **kwargs)


def _changed(func: Callable[..., Any], tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return a tensor that a call writes into, or ``None`` if all it returns is new."""
    out = [leaf for leaf in tree_leaves(kwargs.get("out")) if isinstance(leaf, torch.Tensor)]
    if out:
        return out[0]
    name = getattr(func, "__name__", "")
    is_in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return tensors[0] if is_in_place else None


def install(model: nn.Module, runs_on: dict[Unit, torch.device], away: set[Unit], *, is_ahead: bool) -> None:
    """Have each part of ``model`` run on its device.

    Args:
        model: with its weights at home already.
        runs_on: the device of each part.
        away: parts with a weight on disk, or on another device than they run on.
        is_ahead: fetch the next part while one runs.
    """
    devices = set(runs_on.values())
    if devices <= {torch.device("cpu")} and not away:
        return
    cross_device = CrossDeviceMode() if devices != {torch.device("cpu")} and (len(devices) > 1 or away) else None
    fetching = Fetching(is_ahead=is_ahead) if away else None
    around: list[tuple[nn.Module, _Around]] = [(model, _AroundModel(cross_device, fetching))]
    for unit, device in runs_on.items():
        one = OffloadedPart(unit, device) if unit in away else None
        # A tensor of an open module, which itself does not have one device.
        is_loose = not unit.is_called
        if one is not None or not is_loose:
            parts = (None, None) if is_loose else (device, cross_device)
            around.append((unit.module, _AroundPart(*parts, fetching, one)))
        if one is not None and fetching is not None and not is_loose:
            # A recomputation in backward, or a user, may call a layer without its block.
            around += [(module, _AroundLayer(fetching, one)) for module in one.modules if module is not unit.module]
    # The hook registered last runs first: the whole model's.
    calls_of: dict[nn.Module, list[_Around]] = {}
    for module, calls in reversed(around):
        module.register_forward_pre_hook(OwnHook(calls.before), with_kwargs=True, prepend=True)
        module.register_forward_hook(OwnHook(calls.after), always_call=True)
        calls_of.setdefault(module, []).append(calls)
    for module, all_calls in calls_of.items():
        wrap_call(module, _Interruptible(module, all_calls))


def refuse_training(model: nn.Module) -> None:
    """Have ``model``, whose weights are in 8 bits, refuse to run in training mode."""
    model.register_forward_pre_hook(OwnHook(_refuse_training), prepend=True)


class _Around:
    """The actions around one module's call."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Prepare the call; return changed arguments, or ``None``."""
        raise NotImplementedError

    def after(self, *_: object) -> None:
        """Clean up. Also called when the call raised, and when :meth:`before` did not complete."""


class _AroundModel(_Around):
    """The whole model, whose own forward may combine tensors of several devices."""

    def __init__(self, cross_device: CrossDeviceMode | None, fetching: Fetching | None) -> None:
        self._cross_device = cross_device
        self._fetching = fetching

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module, args, kwargs
        if self._fetching is not None:
            self._fetching.begin()
        if self._cross_device is not None:
            self._cross_device.begin()

    def after(self, *_: object) -> None:
        if self._cross_device is not None:
            self._cross_device.end()
        if self._fetching is not None:
            self._fetching.end()


class _AroundPart(_Around):
    """One part: its inputs and its weights are moved to its device."""

    def __init__(
        self,
        device: torch.device | None,
        cross_device: CrossDeviceMode | None,
        fetching: Fetching | None,
        away: OffloadedPart | None,
    ) -> None:
        self._device = device
        self._cross_device = cross_device
        self._fetching = fetching
        self._away = away
        self._num_entered = 0

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        del module
        arguments = None if self._device is None else moved((args, kwargs), self._device)
        if self._away is not None and self._fetching is not None:
            self._fetching.enter(self._away)
        if self._cross_device is not None and self._device is not None:
            self._cross_device.enter_part(self._device)
        self._num_entered += 1
        return arguments

    def after(self, *_: object) -> None:
        if self._num_entered:
            self._num_entered -= 1
            if self._cross_device is not None and self._device is not None:
                self._cross_device.leave_part()
            if self._away is not None and self._fetching is not None:
                self._fetching.leave(self._away)


class _AroundLayer(_Around):
    """A layer of a part, when it is called without the part."""

    def __init__(self, fetching: Fetching, away: OffloadedPart) -> None:
        self._fetching = fetching
        self._away = away
        self._entered: list[bool] = []

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        alone = not self._fetching.is_running(self._away)
        arguments = None
        if alone:
            arguments = moved((args, kwargs), self._away.device)
            self._fetching.enter(self._away, with_notes=False)
        else:
            self._away.check_shown(module)
        self._entered.append(alone)
        return arguments

    def after(self, *_: object) -> None:
        if self._entered and self._entered.pop():
            self._fetching.leave(self._away)


def _refuse_training(module: nn.Module, _: object) -> None:
    if module.training and torch.is_grad_enabled():
        raise ConfigurationError(
            f"This {type(module).__name__} holds 8-bit weights, which cannot be trained.",
            do="call model.eval() for inference, or place() without int8=True for training",
        )


class _Interruptible:
    """Calls a module, and cleans up after an interrupt: torch runs hooks after an Exception, but not after Ctrl-C.

    A copy or pickle of the module has none.
    """

    def __init__(self, module: nn.Module, calls: list[_Around]) -> None:
        self._module = ref(module)
        self._calls = calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = cast("nn.Module", self._module())
        try:
            return unwrapped_call(module, *args, **kwargs)
        except Exception:
            raise
        except BaseException:
            self._clear_up()
            raise

    @uncompiled
    def _clear_up(self) -> None:
        for calls in self._calls:
            calls.after()

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())
