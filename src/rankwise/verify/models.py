# SPDX-License-Identifier: Apache-2.0
"""The models of a script: the names of their parts, and which strategies of rankwise they go through."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from rankwise.comm.session import current, current_or_none
from rankwise.health.call_site import responsible_module
from rankwise.verify import sketches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch
    from torch import nn

    from rankwise.verify.records import Facts, Sketch

STRATEGIES = ("replicate", "shard", "tensor_parallel", "pipeline", "local_sgd", "parameter_server")
"""Functions of rankwise's that take a model."""
_BETWEEN_WARNING_AND_HANDLER = ("rankwise.log", __name__)
_ABOUT_RESULTS = (*(f"rankwise.{room}." for room in (*STRATEGIES, "place")), "rankwise.comm.optimizer_steps")
"""Modules whose warnings name what makes results depend on the number of ranks."""
_ABOUT_SPEED = "rankwise.replicate.random_numbers.counter"
"""And that of them whose warnings do not."""
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


# -- strategies ----------------------------------------------------------------------------------------------


def gives_up_equality(option: str, value: object) -> bool:
    """Return whether an option of a strategy makes it give another result than one rank's."""
    return (option, value) == ("mode", "async") or (option == "compress" and value is not None)


def takes_own_data(*, but_stages: bool = False) -> bool:
    """Return whether no rank before this one takes the same samples: one of its layers, or of its pipeline."""
    session = current_or_none()
    if session is None or session.axes is None:
        return True
    rank, axes = session.world.rank, session.axes
    return not axes.coordinate(rank, "tp") and (but_stages or not axes.coordinate(rank, "pp"))


def with_rankwise(facts: Facts, inexact: Mapping[str, str]) -> Facts:
    """Return the facts of a rank with what the script uses of rankwise; ``inexact`` is a field of them."""
    # In memory only if the script uses rankwise.
    from rankwise.replicate.random_numbers.model_draws import ways_to_draw  # noqa: PLC0415
    from rankwise.replicate.strategy_registry import strategies_by_parameter  # noqa: PLC0415

    session = current()
    rank = session.world.rank
    return replace(
        facts,
        uses_rankwise=True,
        strategies=tuple(sorted(set(strategies_by_parameter().values()))),
        data_rank=rank if session.axes is None else session.axes.data_rank(rank),
        randomness=tuple(sorted(ways_to_draw())),
        inexact=inexact,
    )


class Warnings(logging.StreamHandler):  # pyright: ignore[reportMissingTypeArgument]
    """Notes what rankwise warns of that makes results depend on the number of ranks, and shows all that it logs."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[rankwise] %(message)s"))
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        """Show a message, and note it if it is such a warning. Called by logging."""
        source = responsible_module(_BETWEEN_WARNING_AND_HANDLER)
        if record.levelno >= logging.WARNING and source.startswith(_ABOUT_RESULTS) and source != _ABOUT_SPEED:
            self._note(record.getMessage())
        super().emit(record)
