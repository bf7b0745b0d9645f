# SPDX-License-Identifier: Apache-2.0
"""A plan given by the user, checked against the model. Used by tensor_parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from rankwise.errors import ConfigurationError
from rankwise.parallel.core.blocks import matching, near
from rankwise.parallel.tensor_parallel.plan import STYLES, TensorPlan, divisors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.parallel.tensor_parallel.plan import Style


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
