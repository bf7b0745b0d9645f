# SPDX-License-Identifier: Apache-2.0
"""Buffers that change during training, kept equal on all ranks: every rank takes rank zero's.

A buffer that ranks update from their own samples would make the result depend on the number of ranks: it is named in a
warning. Ranks compare one checksum of all buffers before a forward pass, in which all ranks take part anyway: after the
first, second and fourth one, and so on, then every 64. If it differs, they compare each buffer before and after the
next forward pass. Used by replicate, shard and pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from operator import is_
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from rankwise.comm.same_state import CheckSchedule, furthest_from, largest_element, numbers_of_all
from rankwise.comm.session import current_or_none
from rankwise.log import warn
from rankwise.replicate.batchnorm import SYNCHRONISED
from rankwise.replicate.loss.graph import first_tensor
from rankwise.replicate.same_model import broadcast_tensors
from rankwise.tensors.checksum import FLOOR, ChecksumOfAll, checksums_of_each, tolerance
from rankwise.torch_private.autograd import version_of
from rankwise.torch_private.modules import BatchNorm, own_buffers, own_modules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Exchange


SMALL_BUFFERS_BYTES = 2**18
"""Up to this size, sending all buffers takes no longer than finding out which have changed."""

BufferSlot = tuple[nn.Module, str]
"""A module and the name of a buffer of its own."""
Buffers = Mapping[BufferSlot, torch.Tensor]
Checksums = dict[BufferSlot, int]


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
        if sum(buffer.nbytes for buffer in buffers.values()) > SMALL_BUFFERS_BYTES:
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


BUFFER_CHECKSUMS = "checksums of buffers"
"""What ranks exchange, in errors."""
BUFFER_CHECKS_EVERY = 64
"""How many training forward passes apart ranks compare, after the first ones."""
PATIENT_BUFFER_CHECKS_EVERY = 1024
"""The same while something differs."""


class _Reported(NamedTuple):
    had_samples: bool
    is_moved_in_forward: int
    is_moved_since: int
    after: int
    now: int
    """Checksums from after the latest forward pass, and from before the next."""

    def has_diverged_from(self, first: _Reported) -> bool:
        """Return whether a rank has changed the buffer, and differently from the first.

        A change by the first rank alone, as in an evaluation, is one rank's result. A rank without samples may skip a
        change, or compute it from nothing, and does not count.
        """
        in_forward = self.is_moved_in_forward and self.after != first.after
        return bool(self.had_samples and self.now != first.now and (in_forward or self.is_moved_since))


@dataclass(frozen=True, slots=True)
class Suspect:
    """A buffer that some ranks have changed, and that differs there from rank zero's."""

    place: BufferSlot
    own: torch.Tensor
    """This rank's value."""
    counting: tuple[int, ...]
    """The ranks that have changed it, with samples."""


class DivergedBuffers:
    """Compares the buffers of one model, but for those of BatchNorm, which has a warning of its own."""

    def __init__(self, model: nn.Module, exchange: Exchange, model_name: str) -> None:
        self._model = model
        self._model_name = model_name
        self._exchange = exchange
        self._schedule = CheckSchedule(0, BUFFER_CHECKS_EVERY)
        self._checksum = ChecksumOfAll()
        self.is_close = False
        """Whether ranks compare each buffer around the forward pass under way. The same on all of them."""
        self._num_forwards = 0
        self._had_samples = True
        self._before: Checksums = {}
        self._after: Checksums = {}
        """From before and after the latest forward pass, if ranks compare each buffer."""
        self._has_warned = False

    def compare(self, buffers: Buffers) -> tuple[set[BufferSlot], list[Suspect]]:
        """Return the buffers that are known to differ between ranks, and the suspects among them.

        Called by: every rank, before each training forward pass, with the buffers that the one before left.
        """
        if self.is_close:
            self.is_close = False
            return self._compare_each(_compared(buffers))
        if self._checksum.is_late or self._schedule.is_due(self._num_forwards):
            compared = list(_compared(buffers).values())
            checksum = self._checksum.now_or_next(compared) if self._num_forwards and compared else None
            if checksum is not None:
                rows = numbers_of_all(self._exchange, [checksum], BUFFER_CHECKSUMS)
                self.is_close = any(row != rows[0] for row in rows)
        return set(), []

    def _compare_each(self, compared: Buffers) -> tuple[set[BufferSlot], list[Suspect]]:
        now = _checksums(compared)
        after = [self._after.get(place, self._before.get(place, 0)) for place in compared]
        in_forward = [one != self._before.get(place, 0) for place, one in zip(compared, after, strict=True)]
        since = [one != now[place] for place, one in zip(compared, after, strict=True)]
        own = [int(self._had_samples), *map(int, in_forward), *map(int, since), *after, *now.values()]
        rows = numbers_of_all(self._exchange, own, BUFFER_CHECKSUMS)
        # Before the difference is known to be more than rounding, and after the warning, there is no hurry.
        self._schedule.be_patient(PATIENT_BUFFER_CHECKS_EVERY)
        unlike: set[BufferSlot] = set()
        suspects: list[Suspect] = []
        for number, place in enumerate(compared):
            first, *others = [_Reported(bool(row[0]), *row[1 + number :: len(compared)]) for row in rows]
            if all(one.now == first.now for one in others):
                continue
            unlike.add(place)
            counting = tuple(rank for rank, one in enumerate(others, 1) if one.has_diverged_from(first))
            if counting and not self._has_warned:
                suspects.append(Suspect(place, compared[place].clone(), counting))
        return unlike, suspects

    def note_before(self, buffers: Buffers, inputs: object) -> None:
        """Note the buffers before a forward pass. Called by: every rank, once its buffers are rank zero's."""
        self._num_forwards += 1
        if self.is_close:
            self._before, self._after = _checksums(_compared(buffers)), {}
            self._had_samples = _has_samples(inputs)

    def note_after(self, buffers: Buffers) -> None:
        """Note the buffers after a forward pass, if ranks compare each buffer."""
        self._after = _checksums(_compared(buffers))

    def warn_of(self, suspects: Sequence[Suspect], buffers: Buffers) -> None:
        """Warn of the first buffer that differs from rank zero's, in ``buffers``, by more than rounding.

        Called by: every rank, with the same suspects from :meth:`compare`; not empty.
        """
        largest = max(largest_element(one) for one in buffers.values())
        found = [_apart(one.own, buffers[one.place].detach(), largest) for one in suspects]
        own = torch.tensor(found, dtype=torch.float64)
        rows = self._exchange.all_gather(own, what="buffers that differ").view(-1, *own.shape).tolist()
        for number, suspect in enumerate(suspects):
            rank = next((one for one in suspect.counting if rows[one][number][0]), None)
            if rank is not None:
                self._has_warned = True
                self._warn(suspect.place, rank, *rows[rank][number][1:])
                return

    def _warn(self, place: BufferSlot, rank: int, index: float, own: float, first: float) -> None:
        module, name = place
        prefix = next((prefix for prefix, one in self._model.named_modules() if one is module), "")
        full_name = f"{prefix}.{name}" if prefix else name
        among = "" if self._exchange.world_size == self._exchange.detector.world_size else " of the ranks with a copy"
        warn(
            f"buffer {full_name} of {self._model_name} differed between ranks after training forward "
            f"{self._num_forwards}, as when each rank updates it from its own samples: element {index:g} was "
            f"{first:g} on rank 0 and {own:g} on rank {rank}{among}; all ranks continue with rank 0's value, so "
            "the buffer depends on the number of ranks; compute it from all samples, with "
            "rankwise.all_reduce(total) and rankwise.all_reduce(count), or with rankwise.all_gather_uneven(x)"
        )


def _compared(buffers: Buffers) -> dict[BufferSlot, torch.Tensor]:
    return {
        place: buffer.detach()
        for place, buffer in buffers.items()
        if not isinstance(place[0], BatchNorm)
        and type(buffer) is torch.Tensor
        and buffer.layout is torch.strided
        and not (buffer.is_meta or buffer.is_quantized)
    }


def _checksums(buffers: Buffers) -> Checksums:
    return dict(zip(buffers, checksums_of_each(list(buffers.values())), strict=True))


def _has_samples(inputs: object) -> bool:
    session = current_or_none()
    batch = None if session is None else session.batches.latest
    first = first_tensor(inputs)
    # A rank without samples may be called with others' as a stand-in.
    return (batch is None or batch.num > 0) and (first is None or first.is_nested or first.shape[0] > 0)


def _apart(own: torch.Tensor, first: torch.Tensor, largest: float) -> tuple[float, float, float, float]:
    """Return whether values differ by more than rounding; the element that differs most; and its two values."""
    furthest, index = furthest_from(own.reshape(-1), first.reshape(-1))
    allowed = tolerance(own.dtype) * max(FLOOR * largest, largest_element(own), largest_element(first))
    values = [one.reshape(-1)[index].item() if one.numel() else 0.0 for one in (own, first)]
    mine, other = (abs(one) if isinstance(one, complex) else float(one) for one in values)
    return float(furthest > allowed), float(index), mine, other
