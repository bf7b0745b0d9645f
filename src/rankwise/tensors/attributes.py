# SPDX-License-Identifier: Apache-2.0
"""The values in an object of any class, as a user's class of samples or of graphs, and the tensors among them."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def tensors_in(value: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors in containers and objects inside each other, with the path to each."""
    if type(value) is torch.Tensor:
        yield path, value
        return
    parts: Mapping[Any, object] = {}
    if isinstance(value, list | tuple):
        parts = dict(enumerate(value))
    elif isinstance(value, Mapping):
        parts = value
    elif not isinstance(value, str | bytes | int | float | None):
        parts = attributes_of(value)
    if depth < _DEEPEST:
        for key, part in parts.items():
            yield from tensors_in(part, f"{path}/{key}", depth + 1)
