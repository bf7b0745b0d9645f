# SPDX-License-Identifier: Apache-2.0
"""The parts of a model that are placed one by one: its blocks, and tensors held by open modules.

Changes nothing. Imported by place and weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from rankwise.place.plan import PartSize
from rankwise.replicate.blocks import has_forward, reasons
from rankwise.torch_private.modules import own_buffers, own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from rankwise.replicate.blocks import Kept


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """A place where a module holds a parameter or a buffer. A tied parameter has several."""

    name: str
    module: nn.Module
    attribute: str
    is_parameter: bool

    @property
    def _table(self) -> dict[str, Any]:
        return cast("dict[str, Any]", (own_parameters if self.is_parameter else own_buffers)(self.module))

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is there now."""
        tensor = self._table[self.attribute]
        return torch.empty(0) if tensor is None else tensor

    def put(self, tensor: torch.Tensor) -> None:
        """Put another tensor there, without the checks of ``nn.Module.__setattr__``."""
        self._table[self.attribute] = tensor


@dataclass(frozen=True, eq=False, slots=True)
class Unit:
    """A part that has one home: a block, or one tensor of an open module."""

    name: str
    why_whole: str
    module: nn.Module
    """The module whose forward needs it."""
    slots: tuple[Slot, ...]
    is_called: bool
    """Whether that module is the part itself, not the open module it belongs to."""

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Its parameters, each once, in the order of their slots."""
        return list({id(slot.tensor): slot.tensor for slot in self.slots if slot.is_parameter}.values())


def units_of(model: nn.Module, keep_whole: Kept | Iterable[Kept] = ()) -> list[Unit]:
    """Return all parts of a model that hold tensors, in the order of registration.

    Raises:
        ConfigurationError: ``keep_whole`` names a module that the model does not have.
    """
    whole = reasons(model, keep_whole)
    units: list[Unit] = []
    seen: set[nn.Module] = set()
    waiting = [(model, "", model)]
    while waiting:
        module, name, caller = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        is_called = has_forward(module)
        caller = module if is_called else caller
        if name in whole:
            slots = [slot for inner, child in module.named_modules() for slot in _slots(child, joined(name, inner))]
            if slots:
                units.append(Unit(name, whole[name], caller, tuple(slots), is_called))
            seen.update(module.modules())
            continue
        units.extend(
            Unit(slot.name, "a single tensor", caller, (slot,), is_called=False) for slot in _slots(module, name)
        )
        children = [(child, joined(name, child_name), caller) for child_name, child in module.named_children()]
        waiting += reversed(children)
    return units


def sizes_of(units: Sequence[Unit], bytes_of: Callable[[Slot], int]) -> list[PartSize]:
    """Return the size of each part; tied parameters count in the first part that has them.

    ``bytes_of`` returns the memory that the tensor of a slot will take.
    """
    first: dict[int, str] = {}
    sizes: list[PartSize] = []
    for unit in units:
        own, fetched, tied_to = 0, 0, None
        here: set[int] = set()
        for slot in unit.slots:
            tensor = slot.tensor
            if id(tensor) in here:
                continue
            here.add(id(tensor))
            fetched += bytes_of(slot) if slot.is_parameter else 0
            if id(tensor) in first:
                tied_to = tied_to or first[id(tensor)]
            else:
                own += bytes_of(slot)
        first.update((key, unit.name) for key in here if key not in first)
        sizes.append(PartSize(unit.name, own, fetched, tied_to))
    return sizes


def _slots(module: nn.Module, name: str) -> list[Slot]:
    held = ((own_parameters(module), True), (own_buffers(module), False))
    return [
        Slot(joined(name, attribute), module, attribute, is_parameter)
        for tensors, is_parameter in held
        for attribute, tensor in tensors.items()
        if tensor is not None
    ]


def joined(name: str, inner: str) -> str:
    """Return the full name of a tensor or module inside a module."""
    return f"{name}.{inner}" if name and inner else name or inner
