# SPDX-License-Identifier: Apache-2.0
"""The values in an object of any class, as a user's class of samples or of graphs, and the tensors among them."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

_DEEPEST = 5
"""Containers and objects inside each other in which tensors are looked for."""


def attributes_of(value: object) -> dict[str, object]:
    """Return the attributes that an object holds, whether its class has slots or not.

    Classes, functions, Python's modules and layers have none: they are code, or state that is not a sample's.
    """
    if isinstance(value, type | FunctionType | MethodType | ModuleType | torch.nn.Module | torch.Tensor):
        return {}
    slots = [name for kind in type(value).__mro__ for name in _slots_of(kind) if hasattr(value, name)]
    return {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})


def _slots_of(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    return [one for one in ((slots,) if isinstance(slots, str) else slots) if not one.startswith("__")]


def tensors_in(value: object) -> list[tuple[str, torch.Tensor]]:
    """Return the plain tensors in containers and objects inside each other, in order, with the path to each."""
    found: list[tuple[str, torch.Tensor]] = []
    pending: list[tuple[str, object, int]] = [("", value, 0)]
    while pending:
        path, one, depth = pending.pop()
        parts: Iterable[tuple[Any, object]] = ()
        if type(one) is torch.Tensor:
            found.append((path, one))
        elif depth >= _DEEPEST or isinstance(one, str | bytes | int | float | None):
            continue
        elif isinstance(one, list | tuple):
            parts = enumerate(one)
        else:
            parts = (one if isinstance(one, Mapping) else attributes_of(one)).items()
        pending += [(f"{path}/{key}", part, depth + 1) for key, part in parts][::-1]
    return found
