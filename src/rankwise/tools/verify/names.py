# SPDX-License-Identifier: Apache-2.0
"""The names of modules, parameters and buffers, which are the same on any number of ranks. Imported by ``recorder``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from rankwise.tools.verify import sketches

if TYPE_CHECKING:
    from torch import nn

    from rankwise.tools.verify.records import Sketch

WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
"""Modules that hold the script's own module, which is recorded instead."""


class Names:
    """The names of modules, parameters and buffers, from the outermost modules that the script has called."""

    def __init__(self) -> None:
        self._roots: dict[int, nn.Module] = {}
        self._modules: dict[int, tuple[nn.Module, str]] = {}
        self._parameters: dict[int, tuple[torch.Tensor, str]] = {}
        self._has: dict[int, tuple[nn.Module, bool]] = {}
        self._copies: dict[int, tuple[nn.Module, str]] = {}

    def has_parameters(self, module: nn.Module) -> bool:
        """Return whether a module has parameters, its own or of modules in it."""
        known = self._has.get(id(module))
        if known is None:
            known = module, next(module.parameters(), None) is not None
            self._has[id(module)] = known
        return known[1]

    def add_root(self, module: nn.Module) -> nn.Module:
        """Name a module that the script calls, and all in it; return the script's own within a wrapper."""
        module = _unwrapped(module)
        if id(module) not in self._roots:
            self._roots[id(module)] = module
            self._name(module)
        return module

    def add_copy(self, module: nn.Module, line: str) -> None:
        """Note a model that the script calls without gradients, and where."""
        module = _unwrapped(module)
        if id(module) not in self._modules:
            self._copies.setdefault(id(module), (module, line))

    def _name(self, root: nn.Module) -> None:
        kind = type(root).__name__
        same = sum(type(one).__name__ == kind for one in self._roots.values())
        base = kind if same == 1 else f"{kind}#{same}"
        for name, module in root.named_modules():
            self._modules.setdefault(id(module), (module, f"{base}.{name}" if name else base))
        for name, parameter in root.named_parameters():
            self._parameters.setdefault(id(parameter), (parameter, f"{base}.{name}"))

    def of(self, module: nn.Module) -> str | None:
        """Return the name of a module, if it is in one that the script called."""
        known = self._modules.get(id(module))
        return None if known is None else known[1]

    def parameter(self, parameter: torch.Tensor) -> str | None:
        """Return the name of a parameter, if its module was called."""
        known = self._parameters.get(id(parameter))
        return None if known is None else known[1]

    def cast(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments with floating-point tensors in the dtype of the module's parameters."""
        dtype = next((one.dtype for one in module.parameters() if one.is_floating_point()), None)
        tensors = sketches.tensors_in((args, kwargs))
        if dtype is None or not any(one.is_floating_point() and one.dtype != dtype for one in tensors):
            return args, kwargs

        def change(leaf: Any) -> Any:
            return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

        return sketches.mapped(args, change), sketches.mapped(kwargs, change)

    def _named_copies(self) -> dict[str, tuple[nn.Module, str]]:
        """Return the models that were called without gradients only, and where first."""
        kinds = [type(root).__name__ for root in self._roots.values()]
        found: dict[str, tuple[nn.Module, str]] = {}
        for key, (module, line) in self._copies.items():
            if key not in self._modules:
                kinds.append(type(module).__name__)
                same = kinds.count(kinds[-1])
                found[kinds[-1] if same == 1 else f"{kinds[-1]}#{same}"] = module, line
        return found

    def lines_of_copies(self) -> dict[str, str]:
        """Return which line first called each model that was called without gradients only."""
        return {name: line for name, (_, line) in self._named_copies().items()}

    def copies(self, *, with_parameters: bool = False) -> dict[str, Sketch]:
        """Return the floating-point buffers of models that were called without gradients only."""
        found: dict[str, Sketch] = {}
        for base, (module, _) in self._named_copies().items():
            held = [*module.named_buffers(), *(module.named_parameters() if with_parameters else ())]
            floats = [
                (name, one) for name, one in held if one.is_floating_point() and not (is_lazy(one) or one.is_meta)
            ]
            found |= {f"{base}.{name}": sketches.of_tensor(one) for name, one in floats}
        return found

    def buffers(self) -> dict[str, Sketch]:
        """Return the floating-point buffers of all modules that were called with gradients."""
        found: dict[str, Sketch] = {}
        for root in self._roots.values():
            base = self.of(root)
            for name, buffer in root.named_buffers():
                if buffer.is_floating_point() and not buffer.is_meta:
                    found[f"{base}.{name}"] = sketches.of_tensor(buffer)
        return found


def _unwrapped(module: nn.Module) -> nn.Module:
    while type(module).__name__ in WRAPPERS:
        module = next(iter(module.children()))
    return module
