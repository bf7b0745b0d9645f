# SPDX-License-Identifier: Apache-2.0
"""Buffers that change during training, kept equal on all ranks: every rank takes rank zero's.

Used by replicate, shard and pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from operator import is_
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from rankwise.replicate.batchnorm import SYNCHRONISED
from rankwise.replicate.same_model import broadcast_tensors
from rankwise.torch_private.autograd import version_of
from rankwise.torch_private.modules import own_buffers, own_modules

if TYPE_CHECKING:
    from rankwise.comm.backends.protocol import Exchange
    from rankwise.replicate.diverged_buffers import DivergedBuffers

SMALL_BYTES = 2**18
"""Up to this size, sending all buffers takes no longer than finding out which have changed."""

BufferSlot = tuple[nn.Module, str]
"""A module and the name of a buffer of its own."""


class BufferSync:
    """Gives every rank the buffers of rank zero before each training forward.

    If they are large (masks, position tables), the ranks first agree on which have changed on any of them.
    The statistics of synchronised BatchNorm are equal on all ranks already.
    """

    def __init__(self, model: nn.Module, exchange: Exchange, diverged: DivergedBuffers | None = None) -> None:
        """Follow the buffers of a model; ``diverged`` names those that ranks update from their own samples."""
        self._places = BufferSlots(model)
        self._exchange = exchange
        self._diverged = diverged
        self._seen = {place: (buffer, version_of(buffer)) for place, buffer in self._places.buffers().items()}
        self._unseen: set[BufferSlot] = set()
        """Buffers that have differed although their version shows no change, as after one through ``.data``."""

    def before_training(self, model: nn.Module, args: object) -> None:
        """Make the buffers equal if this forward trains. Called by torch."""
        if model.training and torch.is_grad_enabled():
            self.before_forward((args,))

    def before_forward(self, inputs: object = ()) -> None:
        """Make the buffers equal. Called by: every rank, before each training forward with these inputs."""
        buffers = self._places.buffers()
        if not buffers:
            return
        unlike, suspects = (set[BufferSlot](), []) if self._diverged is None else self._diverged.compare(buffers)
        self._unseen |= unlike
        to_send = buffers
        if sum(buffer.nbytes for buffer in buffers.values()) > SMALL_BYTES:
            to_send = self._changed_on_any_rank(buffers)
        with torch.no_grad():
            broadcast_tensors(to_send.values(), self._exchange, what="buffers of rank 0")
        self._seen |= {place: (buffer, version_of(buffer)) for place, buffer in to_send.items()}
        if self._diverged is not None:
            if suspects:
                self._diverged.warn_of(suspects, buffers)
            self._diverged.note_before(buffers, inputs)

    def after_forward(self) -> None:
        """Note the buffers after a training forward. Called after each."""
        if self._diverged is not None and self._diverged.is_close:
            self._diverged.note_after(self._places.buffers())

    def _changed_on_any_rank(self, buffers: dict[BufferSlot, torch.Tensor]) -> dict[BufferSlot, torch.Tensor]:
        changed = torch.tensor([self._has_changed(place, buffer) for place, buffer in buffers.items()]).byte()
        changed = self._exchange.all_reduce(changed, "max", what="buffers that changed")
        return {place: buffers[place] for place, moved in zip(buffers, changed.tolist(), strict=True) if moved}

    def _has_changed(self, place: BufferSlot, buffer: torch.Tensor) -> bool:
        if place in self._unseen:
            return True
        before = self._seen.get(place)
        return before is None or before[0] is not buffer or before[1] != version_of(buffer)


class BufferSlots:
    """Where a model has buffers; the model is walked again only when that may have changed.

    A buffer that is replaced, deleted or set to None is noticed at its place. New buffers and layers are counted as
    they are registered. A deleted or inserted layer, which torch does not report, changes the length of a module's
    dict of layers, or makes a new dict.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._counts = count_registrations()
        self._walk()

    def buffers(self) -> dict[BufferSlot, torch.Tensor]:
        """Return the current buffers, but for those of synchronised BatchNorm, in the order of the model."""
        # All in C: a model without buffers pays this on each forward, and nothing else.
        if (
            self._count_seen != self._counts.buffers
            or not all(map(is_, map(own_modules, self._parents), self._layers))
            or list(map(len, self._layers)) != self._num_layers
        ):
            self._walk()
        found: dict[BufferSlot, torch.Tensor] = {}
        for place in self._places:
            module, name = place
            own = own_buffers(module)
            buffer = own[name] if name in own else None  # noqa: SIM401 - torch.jit's has no `get`
            if buffer is not None:
                found[place] = buffer
        return found

    def _walk(self) -> None:
        self._count_seen = self._counts.buffers
        modules = list(self._model.modules())
        self._places: list[BufferSlot] = [
            (module, name)
            for module in modules
            if not isinstance(module, SYNCHRONISED)
            for name, _ in module.named_buffers(recurse=False, remove_duplicate=False)
        ]
        # If nothing has buffers, no deletion matters, and only these two take layers without registering them.
        parents = [
            module
            for module in modules
            if isinstance(module, nn.ModuleList | nn.Sequential) or (self._places and own_modules(module))
        ]
        self._parents = parents
        self._layers = [own_modules(module) for module in parents]
        self._num_layers = [len(layers) for layers in self._layers]


@dataclass(slots=True)
class Registrations:
    """Counts what modules are given; compared with earlier counts they tell at no cost whether to look again."""

    parameters: int = 0
    """Parameters, and layers, which may hold parameters."""
    buffers: int = 0
    """New buffers, and layers. A buffer that replaces another is not counted."""


@cache
def count_registrations() -> Registrations:
    """Return the counts of this process; the first call starts them.

    torch reports every registration in the process, but no deletion, nor ``insert`` of ModuleList and Sequential.
    """
    counts = Registrations()

    def count_parameter(*_: object) -> None:
        counts.parameters += 1

    def count_layer(*_: object) -> None:
        counts.parameters += 1
        counts.buffers += 1

    def count_buffer(module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        # Not `get`: torch.jit's table is only similar to a dict.
        before = own_buffers(module)
        if buffer is not None and (name not in before or before[name] is None):
            counts.buffers += 1

    torch_module.register_module_parameter_registration_hook(count_parameter)
    torch_module.register_module_module_registration_hook(count_layer)
    torch_module.register_module_buffer_registration_hook(count_buffer)
    return counts
