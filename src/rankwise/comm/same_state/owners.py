# SPDX-License-Identifier: Apache-2.0
"""Tensors and modules as the process holds them: whose a tensor is, and what it is called, found through the collector.

torch tells of an optimizer's step which tensors it has stepped, but not which module or wrapper they belong to.
"""

from __future__ import annotations

import gc
import zlib
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

T = TypeVar("T")

REPLICATES = "DistributedDataParallel"
SPREADS = "FullyShardedDataParallel"
"""torch's own wrappers, by name: importing them would load what the script does not use."""


def alive(kind: type[T]) -> list[T]:
    """Return all objects of a class in this process."""
    # Not isinstance: it asks objects that pretend to be of another class.
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def split_by_wrapper(
    parameters: Iterable[torch.Tensor],
) -> tuple[list[tuple[Any, dict[str, torch.Tensor]]], list[torch.Tensor]]:
    """Return each DistributedDataParallel with those of its tensors, by name, and the tensors of no wrapper of torch.

    Tensors without plain values on this rank are left out: of a mesh, on the meta device, sparse ones.
    """
    held = {id(one): one for one in parameters if _is_plain(one)}
    found: list[tuple[Any, dict[str, torch.Tensor]]] = []
    modules: list[Any] = alive(nn.Module) if held else []
    for module in modules:
        kinds = {base.__name__ for base in type(module).__mro__}
        if SPREADS in kinds:
            for one in module.parameters():
                held.pop(id(one), None)
        elif REPLICATES in kinds:
            named: dict[str, torch.Tensor] = dict(module.module.named_parameters())
            own = {name: one for name, one in named.items() if held.pop(id(one), None) is not None}
            if own:
                found.append((module, own))
    return found, list(held.values())


def _is_plain(one: torch.Tensor) -> bool:
    # Only a DTensor has a mesh.
    has_mesh = getattr(one, "device_mesh", None) is not None
    return not (has_mesh or one.is_meta) and one.layout is torch.strided


def names_in_modules(tensors: Sequence[torch.Tensor]) -> list[str | None]:
    """Return the name of each tensor in its module, as ``centers of CenterLoss``; ``None`` if no module has it."""
    found: dict[int, str] = {}
    for module in alive(nn.Module):
        for name, one in module.named_parameters(recurse=False):
            found.setdefault(id(one), f"{name} of {type(module).__name__}")
    return [found.get(id(one)) for one in tensors]


def checksum_of_shapes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the checksum by which ranks match: ranks that step other shapes train other models on purpose."""
    return zlib.crc32(str([(tuple(one.shape), str(one.dtype)) for one in tensors]).encode())
