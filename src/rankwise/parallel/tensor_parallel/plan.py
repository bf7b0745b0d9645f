# SPDX-License-Identifier: Apache-2.0
"""How the layers of a model are split for tensor parallelism, as a value. Pure.

A pair of linear layers is split so that the features between them stay on their rank: the first by its outputs
("column"), the second by its inputs ("row"). Imported by the rest of this package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from torch.distributed.tensor.parallel import ParallelStyle

Style: TypeAlias = "str | ParallelStyle"

STYLES = {
    "column": "a Linear split by its outputs; each rank keeps its part of the output",
    "row": "a Linear split by its inputs, which are parts; the output is whole",
    "head": "a Linear split by its outputs, which are then gathered whole",
    "vocab": "an Embedding split by its words; the output is whole",
    "replicate": "whole on every rank",
}


@dataclass
class TensorPlan:
    """The style of each layer that is split."""

    styles: dict[str, Style] = field(default_factory=dict)
    """By name of the module."""
    heads: dict[str, dict[str, int]] = field(default_factory=dict)
    """Attributes of modules that count heads, and their values on one rank."""
    whole: dict[str, str] = field(default_factory=dict)
    """Modules that were left whole, and why."""

    def __str__(self) -> str:
        lines = [f"{name}: {style}" for name, style in self.styles.items()]
        lines += [f"{name}: {', '.join(f'{a}={n}' for a, n in counts.items())}" for name, counts in self.heads.items()]
        return "\n".join(lines + [f"{name}: whole, {why}" for name, why in self.whole.items()])


def tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the places of each parameter that has several."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def check_tied(model: nn.Module, plan: TensorPlan) -> None:
    """Raise unless every place of a tied parameter is split the same way.

    Raises:
        ConfigurationError: it is split in different ways.
    """
    name_of = {module: name for name, module in model.named_modules()}
    dims = {"column": 0, "head": 0, "vocab": 0, "row": 1}
    for places in tied(model):
        names = [name_of[module] for module, _ in places]
        styles = [plan.styles.get(name, "replicate") for name in names]
        if len({dims.get(style) if isinstance(style, str) else style for style in styles}) > 1:
            raise ConfigurationError(
                f"{names[0]} and {names[1]} share a parameter, but the plan splits them differently.",
                evidence="\n".join(f"{name}: {style}" for name, style in zip(names, styles, strict=True)),
                do='use matching styles for both, such as "vocab" and "head", or omit both',
            )


def is_inside(name: str, wholes: Mapping[str, str]) -> bool:
    """Return whether a module is a part of one that stays whole."""
    return any(name.startswith(f"{whole}.") for whole in wholes)


def join(name: str, child: str) -> str:
    """Return the full name of a child; the model itself is named by an empty text."""
    return f"{name}.{child}" if name else child


def divisors(size: int, tp: int) -> str:
    """Return, in words, among how many ranks a size can be divided evenly."""
    fitting = [str(n) for n in range(1, max(tp, 2) + 1) if size % n == 0]
    return " or ".join(fitting)
