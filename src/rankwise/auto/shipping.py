# SPDX-License-Identifier: Apache-2.0
"""A module of the script as servers have it: sent by value where it is the script's own; parameters and buffers copied.

Values are compared or copied before each call, not assumed unchanged: torch counts only the writes that it makes
itself, and ``p.data -= lr * p.grad`` is none of them. On one host all values are copied, into memory that all ranks
share; between hosts and on devices those are sent that differ from what was sent before: by broadcast, unless to one
rank's CPU.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import warnings
import weakref
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from rankwise.auto.code_reads import is_of_script
from rankwise.auto.connection import SharedBytes, TensorFacts, Values, lay_out
from rankwise.auto.proof import buffers_of, parameters_of
from rankwise.torch_private.autograd import version_of
from rankwise.torch_private.tensors import TreeSpec, foreach_copy_

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.comm.backends.protocol import Exchange


_by_value: set[str] = set()


def dumped(module: nn.Module, number_of: Callable[[object], int | None]) -> bytes:
    """Return a module as bytes.

    Args:
        module: to send.
        number_of: returns the number of a tensor that servers have a copy of.

    Raises:
        Exception: it cannot be pickled: its classes may run any code.
    """
    cloudpickle = importlib.import_module("cloudpickle")
    for name, loaded in list(sys.modules.items()):
        if name not in _by_value and name != "__main__":
            _by_value.add(name)
            if is_of_script(name):
                cloudpickle.register_pickle_by_value(loaded)
    file = io.BytesIO()

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
        def persistent_id(self, obj: object) -> int | None:
            return number_of(obj)

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, nn.Module) and is_parametrized(obj):
                # Torch refuses to pickle these: their class exists in this process only, and cloudpickle sends it.
                return object.__new__, (type(obj),), vars(obj)
            return super().reducer_override(obj)

    Pickler(file).dump(module)
    return file.getvalue()


def dumped_tree(tree: TreeSpec) -> bytes:
    """Return the structure of arguments as bytes. Its classes may be the script's, as named tuples are."""
    return cast("bytes", importlib.import_module("cloudpickle").dumps(tree))


def loaded_tree(data: bytes) -> TreeSpec:
    """Return what :func:`dumped_tree` was given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about a class of its own
        return cast("TreeSpec", pickle.loads(data))  # noqa: S301 - rank zero holds the job's secret


def loaded(data: bytes, tensor: Callable[[int], torch.Tensor]) -> Any:
    """Return the module that :func:`dumped` was given, with a server's own copies of its tensors."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: int, /) -> torch.Tensor:
            return tensor(pid)

    module = Unpickler(io.BytesIO(data)).load()
    # torch.compile looks for the globals of the script's functions in __main__.
    for part in module.modules():
        of_forward = getattr(type(part).forward, "__globals__", {})
        if of_forward.get("__name__") == "__main__":
            vars(sys.modules["__main__"]).update(of_forward)
    return module


_FACTS = attrgetter("shape", "dtype", "device", "requires_grad")


@dataclass(slots=True)
class _Copy:
    """What servers have of one tensor of the script."""

    number: int
    facts: Any
    values: torch.Tensor
    memory: SharedBytes | None = None
    """Where all ranks see the values."""
    version: int = -1
    """The script's tensor's when they were copied."""


class TensorsOfModule:
    """The parameters and buffers of one module."""

    def __init__(self, module: nn.Module, table: TensorTable) -> None:
        self.parameters, self.buffers = parameters_of(module), buffers_of(module)
        self._facts = list(map(_FACTS, self.all))
        self.copies = [table.copy_of(one) for one in self.all]

    @property
    def all(self) -> list[torch.Tensor]:
        """Parameters, then buffers."""
        return [*self.parameters, *self.buffers]

    def is_current(self) -> bool:
        """Return whether each has the shape, dtype and device that it had."""
        return list(map(_FACTS, self.all)) == self._facts

    def restore_buffers(self) -> None:
        """Give the script's buffers their values from before the call."""
        for own, copied in zip(self.buffers, self.copies[len(self.parameters) :], strict=True):
            own.data.copy_(copied.values)  # a graph of an earlier call may hold it, and does not read it


class TensorTable:
    """All tensors that servers have copies of. On rank zero."""

    def __init__(self, *, is_shared: bool, num_servers: int) -> None:
        """``is_shared``: whether all ranks are on this host."""
        self._is_shared = is_shared
        self._num_servers = num_servers
        self._known: dict[int, _Copy] = {}
        """By ``id`` of the script's tensor."""
        self._count = 0
        self._new: list[torch.Tensor] = []
        self._facts: list[TensorFacts] = []
        self._changed: dict[int, torch.Tensor] = {}
        self._dropped: list[int] = []
        self._placed: list[SharedBytes] = []
        """Memory that servers will hear of, or are about to open: its values may have moved on already."""
        self._announced: list[SharedBytes] = []

    def number_of(self, thing: object) -> int | None:
        """Return the number of a tensor that servers have a copy of."""
        known = self._known.get(id(thing)) if isinstance(thing, torch.Tensor) else None
        return None if known is None else known.number

    @torch.inference_mode(mode=False)
    def copy_of(self, tensor: torch.Tensor) -> _Copy:
        """Return what servers have of a tensor: something new if its shape, dtype or device is."""
        known, facts = self._known.get(id(tensor)), _FACTS(tensor)
        if known is not None and known.facts == facts:
            return known
        if known is None:
            weakref.finalize(tensor, self._drop, id(tensor)).atexit = False
        else:
            self._dropped.append(known.number)
        self._count += 1
        copied = _Copy(self._count, facts, torch.empty_like(tensor, requires_grad=False))
        self._known[id(tensor)] = copied
        self._new.append(tensor)
        return copied

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def copy(self, held: TensorsOfModule) -> None:
        """Copy the values of a module's tensors as they are now."""
        self._place_new()
        shared = [(one, copied) for one, copied in zip(held.all, held.copies, strict=True) if copied.memory is not None]
        if shared:
            foreach_copy_([copied.values for _, copied in shared], [own for own, _ in shared])
        if len(shared) == len(held.copies):
            return
        for own, copied in zip(held.all, held.copies, strict=True):
            version = version_of(own)
            if copied.memory is None and (version != copied.version or not torch.equal(own, copied.values)):
                copied.values.copy_(own)
                copied.version = version
                self._changed[copied.number] = copied.values

    def message(self, held: TensorsOfModule) -> tuple[Values, list[torch.Tensor]]:
        """Return what servers need for a call of a module with the values copied last, and the values that are sent."""
        sent, self._changed = self._changed, {}
        # A call may have changed the copies of buffers.
        of_buffers = held.copies[len(held.parameters) :]
        sent |= {copied.number: copied.values for copied in of_buffers if copied.memory is None}
        dropped, self._dropped = self._dropped, []
        facts, self._facts = [one for one in self._facts if one.number not in dropped], []
        self._announced, self._placed = self._placed, []
        by_broadcast = self._num_servers > 1 or any(one.device.type != "cpu" for one in sent.values())
        values = Values(facts, list(sent), by_broadcast and bool(sent), dropped)
        return values, list(sent.values())

    def _place_new(self) -> None:
        """Note what servers must know of new tensors, and have their values lie in shared memory if there is any."""
        new, self._new = [one for one in self._new if id(one) in self._known], []
        places, num_bytes = lay_out(new)
        memory = None
        if new and self._is_shared and all(one.device.type == "cpu" for one in new):
            memory = SharedBytes(num_bytes)
            self._placed.append(memory)
        for one, place in zip(new, places, strict=True):
            copied = self._known[id(one)]
            if memory is not None:
                copied.memory, copied.values = memory, memory.at(place)
            ticket = None if memory is None else memory.ticket
            kind = "parameter" if isinstance(one, nn.Parameter) else "buffer"
            is_on_cpu = one.device.type == "cpu"
            self._facts.append(TensorFacts(copied.number, kind, one.requires_grad, is_on_cpu, place, ticket))

    def _drop(self, key: int) -> None:
        self._dropped.append(self._known.pop(key).number)


class ServerTensors:
    """The copies, on a server."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[int, torch.Tensor] = {}
        self._shared: dict[int, torch.Tensor] = {}
        """By ``id`` of a buffer, its values before each call, where rank zero writes them into shared memory."""

    def __getitem__(self, number: int) -> torch.Tensor:
        return self._tensors[number]

    @torch.no_grad()
    def update(self, values: Values, sent: Sequence[torch.Tensor], exchange: Exchange) -> None:
        """Take in what rank zero says before a call, and the values it has sent with that."""
        for number in values.dropped:
            self._shared.pop(id(self._tensors.pop(number, None)), None)
        opened: dict[object, SharedBytes] = {}
        for one in values.new:
            _, shape, strides, dtype = one.place
            if one.memory is None:
                device = "cpu" if one.is_on_cpu else self._device
                copied = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            else:
                memory = opened.setdefault(one.memory, opened.get(one.memory) or SharedBytes(0, one.memory))
                copied = memory.at(one.place)
            if one.kind == "parameter":
                self._tensors[one.number] = nn.Parameter(copied, one.requires_grad)
                continue
            # A call may change its buffers, as rank zero's does: each rank has its own.
            self._tensors[one.number] = own = copied.clone()
            if one.memory is not None:
                self._shared[id(own)] = copied
        if values.by_broadcast:
            sent = broadcast([self._tensors[number] for number in values.sent], exchange)
        for number, value in zip(values.sent, sent, strict=True):
            self._tensors[number].data.copy_(value)

    @torch.no_grad()
    def reset(self, buffers: Sequence[torch.Tensor]) -> None:
        """Give buffers the values that they have on rank zero before a call."""
        pairs = [(one, shared) for one in buffers if (shared := self._shared.get(id(one))) is not None]
        if pairs:
            # Of an earlier call's graph rank zero's own backward says whether torch lets values change.
            foreach_copy_([one.data for one, _ in pairs], [shared for _, shared in pairs])


@torch.no_grad()
def broadcast(tensors: Sequence[torch.Tensor], exchange: Exchange) -> list[torch.Tensor]:
    """Return the values that rank zero has, with one message per dtype and device. Called by: every rank.

    Args:
        tensors: of the same shapes and dtypes on every rank.
        exchange: of all ranks.
    """
    values: dict[int, torch.Tensor] = {}
    for kind in dict.fromkeys((one.dtype, one.device) for one in tensors):
        places = [place for place, one in enumerate(tensors) if (one.dtype, one.device) == kind]
        flat = torch.cat([tensors[place].reshape(-1) for place in places])
        parts = exchange.broadcast(flat, 0, what="parameters of a split call").split(
            [tensors[place].numel() for place in places]
        )
        values |= {place: part.view(tensors[place].shape) for place, part in zip(places, parts, strict=True)}
    return [values[place] for place in range(len(tensors))]
