# SPDX-License-Identifier: Apache-2.0
"""The names of modules, parameters and buffers, which are the same on any number of ranks. Imported by ``recorder``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from rankwise.verify import sketches

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import nn

    from rankwise.verify.records import Sketch

WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
"""Modules that hold the script's own module, which is recorded instead."""


class Names:
    """The names of modules, parameters and buffers, from the outermost modules that the script has called."""

    def __init__(self) -> None:
        self._roots: dict[nn.Module, str] = {}
        self._modules: dict[nn.Module, str] = {}
        self._parameters: dict[torch.Tensor, str] = {}
        self._have_parameters: dict[nn.Module, bool] = {}
        self._copies: dict[nn.Module, str] = {}
        """Models that the script has called without gradients, and where first."""

    def has_parameters(self, module: nn.Module) -> bool:
        """Return whether a module has parameters, its own or of modules in it."""
        known = self._have_parameters.get(module)
        if known is None:
            known = self._have_parameters[module] = next(module.parameters(), None) is not None
        return known

    def add_root(self, module: nn.Module) -> nn.Module:
        """Name a module that the script calls, and all in it; return the script's own within a wrapper."""
        root = _unwrapped(module)
        if root not in self._roots:
            base = self._roots[root] = numbered(root, self._roots)
            for name, inner in root.named_modules():
                self._modules.setdefault(inner, f"{base}.{name}" if name else base)
            for name, parameter in root.named_parameters():
                self._parameters.setdefault(parameter, f"{base}.{name}")
        return root

    def add_copy(self, module: nn.Module, line: str) -> None:
        """Note a model that the script calls without gradients, and where."""
        self._copies.setdefault(_unwrapped(module), line)

    def of(self, module: nn.Module) -> str | None:
        """Return the name of a module, if it is in one that the script called."""
        return self._modules.get(module)

    def parameter(self, parameter: torch.Tensor) -> str | None:
        """Return the name of a parameter, if its module was called."""
        return self._parameters.get(parameter)

    def cast(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments with floating-point tensors in the dtype of the module's parameters."""
        dtype = next((one.dtype for one in module.parameters() if one.is_floating_point()), None)
        floats = [one for one in sketches.tensors_in((args, kwargs)) if one.is_floating_point()]
        if dtype is None or all(one.dtype == dtype for one in floats):
            return args, kwargs
        return sketches.cast((args, kwargs), dtype)

    def _named_copies(self) -> dict[str, nn.Module]:
        """Return the models that were called without gradients only."""
        named: dict[nn.Module, str] = {}
        for module in self._copies:
            if module not in self._modules:
                named[module] = numbered(module, (*self._roots, *named))
        return {name: module for module, name in named.items()}

    def lines_of_copies(self) -> dict[str, str]:
        """Return which line first called each model that was called without gradients only."""
        return {name: self._copies[module] for name, module in self._named_copies().items()}

    def copies(self, *, with_parameters: bool = False) -> dict[str, Sketch]:
        """Return the floating-point buffers of models that were called without gradients only."""
        held = {name: [*one.named_buffers()] for name, one in self._named_copies().items()}
        if with_parameters:
            held = {name: [*held[name], *one.named_parameters()] for name, one in self._named_copies().items()}
        return {f"{base}.{name}": one for base, tensors in held.items() for name, one in _sketched(tensors).items()}

    def buffers(self) -> dict[str, Sketch]:
        """Return the floating-point buffers of all modules that were called with gradients."""
        held = {self._modules[root]: root.named_buffers() for root in self._roots}
        return {f"{base}.{name}": one for base, tensors in held.items() for name, one in _sketched(tensors).items()}


def numbered(item: object, others: Iterable[object]) -> str:
    """Return the name of an object's class, with a number if there are others of its name."""
    kind = type(item).__name__
    same = sum(type(other).__name__ == kind for other in others)
    return f"{kind}#{same + 1}" if same else kind


def _sketched(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Sketch]:
    held = ((name, one) for name, one in tensors if not is_lazy(one) and not one.is_meta)
    return {name: sketches.of_tensor(one) for name, one in held if one.is_floating_point()}


def _unwrapped(module: nn.Module) -> nn.Module:
    while type(module).__name__ in WRAPPERS:
        module = next(iter(module.children()))
    return module
