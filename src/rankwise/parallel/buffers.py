# SPDX-License-Identifier: Apache-2.0
"""Buffers that change while training, kept equal on all ranks: rank zero's count. Used by replicate."""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING

import torch
from torch import nn

from rankwise.parallel.batchnorm import SYNCHRONISED
from rankwise.parallel.registrations import count_registrations
from rankwise.parallel.same_model import broadcast_tensors
from rankwise.torch_private.autograd import version_of
from rankwise.torch_private.modules import own_buffers, own_modules

if TYPE_CHECKING:
    from rankwise.exchange.protocol import Exchange
    from rankwise.parallel.parted_buffers import PartedBuffers

SMALL_BYTES = 2**18
"""Up to this size, sending all buffers takes no longer than asking which have changed."""

Place = tuple[nn.Module, str]
"""A module and the name of a buffer of its own."""


class BufferSync:
    """Gives every rank the buffers of rank zero before each training forward.

    Where they are large (masks, position tables), the ranks first agree on which have changed on any of them.
    The statistics of synchronised BatchNorm are equal on all ranks already.
    """

    def __init__(self, model: nn.Module, exchange: Exchange, parted: PartedBuffers | None = None) -> None:
        """Follow the buffers of a model.

        Args:
            model: whose buffers they are.
            exchange: the ranks.
            parted: names what ranks update from their own samples.
        """
        self._places = BufferPlaces(model)
        self._exchange = exchange
        self._parted = parted
        self._seen = {place: (buffer, version_of(buffer)) for place, buffer in self._places.buffers().items()}
        self._unseen: set[Place] = set()
        """Buffers that have differed: what is changed through ``.data`` has no other version."""

    def before_forward(self, inputs: object = ()) -> None:
        """Make the buffers equal.

        Called by: every rank, before each training forward.

        Args:
            inputs: what the model is called with.
        """
        buffers = self._places.buffers()
        if not buffers:
            return
        unlike, suspects = (set[Place](), []) if self._parted is None else self._parted.compare(buffers)
        self._unseen |= unlike
        to_send = buffers
        if sum(buffer.nbytes for buffer in buffers.values()) > SMALL_BYTES:
            to_send = self._changed_on_any_rank(buffers)
        with torch.no_grad():
            broadcast_tensors(to_send.values(), self._exchange, what="buffers of rank 0")
        self._seen |= {place: (buffer, version_of(buffer)) for place, buffer in to_send.items()}
        if self._parted is not None:
            if suspects:
                self._parted.tell(suspects, buffers)
            self._parted.note_before(buffers, inputs)

    def after_forward(self) -> None:
        """Note what a training forward has made of the buffers. Called after each."""
        if self._parted is not None and self._parted.is_close:
            self._parted.note_after(self._places.buffers())

    def _changed_on_any_rank(self, buffers: dict[Place, torch.Tensor]) -> dict[Place, torch.Tensor]:
        changed = torch.tensor([self._has_changed(place, buffer) for place, buffer in buffers.items()]).byte()
        changed = self._exchange.all_reduce(changed, "max", what="buffers that changed")
        return {place: buffers[place] for place, moved in zip(buffers, changed.tolist(), strict=True) if moved}

    def _has_changed(self, place: Place, buffer: torch.Tensor) -> bool:
        if place in self._unseen:
            return True
        before = self._seen.get(place)
        return before is None or before[0] is not buffer or before[1] != version_of(buffer)


class BufferPlaces:
    """Where a model has buffers; the model is walked again only when that may have changed.

    A buffer that is replaced, deleted or set to None is seen by looking at its place. New buffers and layers are
    counted as they are registered. What torch does not tell of (a deleted layer, an inserted one) changes the
    length of a module's dict of layers, or is a new dict.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._counts = count_registrations()
        self._walk()

    def buffers(self) -> dict[Place, torch.Tensor]:
        """Return the buffers there are now, but for those of synchronised BatchNorm, in the order of the model."""
        if self._may_have_changed():
            self._walk()
        found: dict[Place, torch.Tensor] = {}
        for place in self._places:
            module, name = place
            own = own_buffers(module)
            buffer = own[name] if name in own else None  # noqa: SIM401 - torch.jit's has no `get`
            if buffer is not None:
                found[place] = buffer
        return found

    def _may_have_changed(self) -> bool:
        # In C throughout: a model without buffers pays this on each forward, and nothing else.
        return (
            self._count_seen != self._counts.buffers
            or not all(map(is_, map(own_modules, self._parents), self._layers))
            or list(map(len, self._layers)) != self._num_layers
        )

    def _walk(self) -> None:
        self._count_seen = self._counts.buffers
        modules = list(self._model.modules())
        self._places: list[Place] = [
            (module, name)
            for module in modules
            if not isinstance(module, SYNCHRONISED)
            for name, _ in module.named_buffers(recurse=False, remove_duplicate=False)
        ]
        # Where nothing has buffers, no deletion matters, and only these two take layers without a word.
        parents = [
            module
            for module in modules
            if isinstance(module, nn.ModuleList | nn.Sequential) or (self._places and own_modules(module))
        ]
        self._parents = parents
        self._layers = [own_modules(module) for module in parents]
        self._num_layers = [len(layers) for layers in self._layers]
