# SPDX-License-Identifier: Apache-2.0
"""Hooks around the calls of a placed model's modules: inputs are moved, weights are fetched.

The hooks after a call also run when it is interrupted. A copy or pickle of the model has no hooks. Imported by place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import torch

from rankwise.errors import ConfigurationError
from rankwise.place.across_devices import CrossDeviceMode, moved
from rankwise.place.fetch import Fetching, OffloadedPart
from rankwise.replicate.own_hooks import OwnHook
from rankwise.torch_private.compiler import uncompiled
from rankwise.torch_private.modules import unwrapped_call, wrap_call

if TYPE_CHECKING:
    from torch import nn

    from rankwise.place.units import Unit

    Arguments = tuple[tuple[Any, ...], dict[str, Any]]


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
        alone = not self._away.is_running
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
