# SPDX-License-Identifier: Apache-2.0
"""The options of an optimizer's groups (learning rate, momentum) as JSON, and back. Values only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Options = dict[str, Any]


def options_of(optimizer: torch.optim.Optimizer) -> list[Options]:
    """Return the options of every group.

    Raises:
        ConfigurationError: there is one that is no number, text or tuple of them.
    """
    return [
        {name: _plain(name, value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def set_options(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Give every group the options that :func:`options_of` returned."""
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        for name, value in options.items():
            now = group.get(name)
            if isinstance(now, torch.Tensor):
                now.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) and not isinstance(now, list) else value


def _plain(name: str, value: object) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(name, one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigurationError(
        f"The optimizer's option {name} is a {type(value).__name__}, which cannot be sent to a parameter server.",
        do="use an optimizer whose options are numbers, texts, or tuples of them",
    )
