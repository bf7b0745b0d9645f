# SPDX-License-Identifier: Apache-2.0
"""How the layers of a model are split for tensor parallelism, as a value; and a plan given by the user, checked.

A pair of linear layers is split so that the features between them stay on their rank: the first by its outputs
("column"), the second by its inputs ("row"). Imported by the rest of this package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from rankwise.errors import ConfigurationError
from rankwise.replicate.blocks import matching, near

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def given_plan(model: nn.Module, given: Mapping[str, Style], tp: int) -> TensorPlan:
    """Return the plan of styles by module name, with ``*`` for any part of a name; later entries win.

    Raises:
        ConfigurationError: no module has a name, a style is unknown or does not fit its module, or ``tp`` ranks cannot
            share a size evenly.
    """
    if not given:
        raise ConfigurationError(
            "The plan of tensor_parallel() splits nothing.",
            do='name the layers to split: plan={"layers.*.up": "column", "layers.*.down": "row"}',
        )
    modules = dict(model.named_modules())
    styles: dict[str, Style] = {}
    for pattern, style in given.items():
        found = matching(pattern, modules) if isinstance(pattern, str) else []
        if not found:
            raise ConfigurationError(
                f"The plan names {pattern!r}, but {type(model).__name__} has no such module.",
                evidence=near(str(pattern), modules),
                do="pass names from model.named_modules(), with * for a part: layers.*.up",
            )
        for name in found:
            _check_style(name, modules[name], style, tp)
            styles[name] = style
    return TensorPlan({name: style for name, style in styles.items() if style != "replicate"})


def _check_style(name: str, module: nn.Module, style: object, tp: int) -> None:
    if isinstance(style, ParallelStyle):
        return
    if not isinstance(style, str) or style not in STYLES:
        raise ConfigurationError(
            f"Unknown style {style!r} of {name} in the plan.",
            evidence="\n".join(f'"{known}": {means}' for known, means in STYLES.items()),
            do="use one of these, or a style of torch.distributed.tensor.parallel",
        )
    if style == "replicate":
        return
    wanted = nn.Embedding if style == "vocab" else nn.Linear
    if not isinstance(module, wanted):
        raise ConfigurationError(
            f'The style "{style}" of {name} requires a {wanted.__name__}, not a {type(module).__name__}.',
            do="pass a style of torch.distributed.tensor.parallel for other layers",
        )
    size, what = 0, ""
    if isinstance(module, nn.Linear) and style in {"column", "row"}:
        size, what = (module.out_features, "outputs") if style == "column" else (module.in_features, "inputs")
    if size % tp:
        raise ConfigurationError(
            f"{name} has {size} {what}, which cannot be divided evenly among {tp} ranks.",
            do=f"use {divisors(size, tp)} ranks along tp, or omit it from the plan",
        )


def tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the places of each parameter that has several."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def split_differently(model: nn.Module, styles: Mapping[str, Style]) -> dict[str, Style]:
    """Return the first modules that share a parameter which they would split differently, and their styles."""
    name_of = {module: name for name, module in model.named_modules()}
    dims = {"column": 0, "head": 0, "vocab": 0, "row": 1}
    for places in tied(model):
        sharing = {name_of[module]: styles.get(name_of[module], "replicate") for module, _ in places}
        if len({dims.get(style) if isinstance(style, str) else style for style in sharing.values()}) > 1:
            return sharing
    return {}


def check_tied(model: nn.Module, plan: TensorPlan) -> None:
    """Raise unless every place of a tied parameter is split the same way.

    Raises:
        ConfigurationError: it is split in different ways.
    """
    if sharing := split_differently(model, plan.styles):
        first, second, *_ = sharing
        raise ConfigurationError(
            f"{first} and {second} share a parameter, but the plan splits them differently.",
            evidence="\n".join(f"{name}: {style}" for name, style in sharing.items()),
            do='use matching styles for both, such as "vocab" and "head", or omit both',
        )


def join(name: str, child: str) -> str:
    """Return the full name of a child; the model itself is named by an empty text."""
    return f"{name}.{child}" if name else child


def divisors(size: int, tp: int) -> str:
    """Return, in words, among how many ranks a size can be divided evenly."""
    fitting = [str(n) for n in range(1, max(tp, 2) + 1) if size % n == 0]
    return " or ".join(fitting)
