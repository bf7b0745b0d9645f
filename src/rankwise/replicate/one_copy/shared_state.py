# SPDX-License-Identifier: Apache-2.0
"""The state of one optimizer in memory that the ranks of a host share: each rank updates that of its parameters.

Every rank finds the whole state in ``optimizer.state``: its own part is the shared memory itself, the parts of others
are private views of it. So ``state_dict()`` is complete on every rank, and no rank has to be asked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rankwise.comm.backends.mapping import LINE_BYTES, PAGE_BYTES, rounded_up
from rankwise.comm.collectives.group import gather_bytes
from rankwise.replicate.one_copy.seen_state import SeenState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.optim.optimizer import Optimizer

    from rankwise.comm.backends.mapping import ViewPart
    from rankwise.comm.backends.shared_memory import SharedMemory

_WHAT = "opening shared memory for the state of an optimizer"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the state of a parameter."""

    position: int
    """Of the parameter among all of the optimizer."""
    key: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    start: int

    def to_json(self) -> list[Any]:
        """Return it for other ranks."""
        return [self.position, self.key, self.shape, self.stride, str(self.dtype).removeprefix("torch."), self.start]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Entry:
        """Return what :meth:`to_json` returned."""
        position, key, shape, stride, dtype, start = values
        return cls(position, key, tuple(shape), tuple(stride), getattr(torch, dtype), start)


class SharedState:
    """The state of one optimizer's parameters, as far as it lies in shared memory."""

    def __init__(self) -> None:
        self._own: dict[tuple[int, str], torch.Tensor] = {}
        """The shared memory, by the position of the parameter and the key."""
        self._own_views: dict[tuple[int, str], torch.Tensor] = {}
        self._of_others: dict[int, dict[str, torch.Tensor]] = {}
        """Views, by the position of the parameter."""
        self._views: list[ViewPart] = []
        self._seen = SeenState()

    @property
    def has_tensors(self) -> bool:
        """Whether any rank has state here."""
        return bool(self._views)

    def share_new(
        self, optimizer: Optimizer, owned: Iterable[tuple[int, torch.Tensor]], parameters: Sequence[torch.Tensor]
    ) -> bool:
        """Have the state of this rank's parameters be in shared memory; return whether some of it has no place yet.

        A step, ``load_state_dict`` or the script may have put other tensors into the state. Those that the script has
        put into the state of others' parameters are dropped: the owners have them too.
        """
        if not self._seen.look(optimizer):
            return False
        is_missing = False
        for position, parameter in owned:
            state = optimizer.state.get(parameter)
            if not state:
                continue
            for key, value in state.items():
                shared = self._own.get((position, key))
                if shared is value or not isinstance(value, torch.Tensor):
                    continue
                if shared is None or shared.shape != value.shape or shared.dtype != value.dtype:
                    is_missing = True
                    continue
                shared.copy_(value)
                state[key] = shared
        self.show_others(optimizer, parameters)
        self._seen.look(optimizer)
        return is_missing

    @torch.no_grad()
    def extend(
        self, optimizer: Optimizer, owned: Iterable[tuple[int, torch.Tensor]], exchange: SharedMemory
    ) -> dict[int, str]:
        """Give places to the state that has none.

        Called by: every rank. The others see it after the next meeting, with :meth:`show_others`.

        Returns:
            The reasons of the ranks that have too little memory: if there are any, nothing has changed.
        """
        new, place = self._without_place(optimizer, owned)
        text = json.dumps([place, [entry.to_json() for entry, *_ in new]])
        texts = gather_bytes(exchange, text.encode(), _WHAT)
        own_host = next(ranks for ranks in exchange.hosts if exchange.rank in ranks)
        found = [json.loads(texts[rank]) for rank in own_host]
        if not any(json.loads(one)[1] for one in texts):
            return {}
        starts = [PAGE_BYTES]
        for num_bytes, _ in found:
            starts.append(rounded_up(starts[-1] + num_bytes, PAGE_BYTES))
        own = own_host.index(exchange.rank)
        memory, reasons = exchange.host_memory(starts[-1], [(starts[own], starts[own + 1] - starts[own])])
        if memory is None or memory.mapping.private is None:
            return reasons
        view = memory.mapping.private
        for entry, value, state in new:
            shared = _tensor(memory.mapping, entry, starts[own])
            shared.copy_(value)
            key = entry.position, entry.key
            state[entry.key] = self._own[key] = shared
            self._own_views[key] = _tensor(view, entry, starts[own])
        for local_rank, (_, entries) in enumerate(found):
            if local_rank != own:
                for entry in map(Entry.from_json, entries):
                    views = self._of_others.setdefault(entry.position, {})
                    views[entry.key] = _tensor(view, entry, starts[local_rank])
        self._views.append(view.part(PAGE_BYTES, starts[-1] - PAGE_BYTES))
        return {}

    def _without_place(
        self, optimizer: Optimizer, owned: Iterable[tuple[int, torch.Tensor]]
    ) -> tuple[list[tuple[Entry, torch.Tensor, dict[str, Any]]], int]:
        """Return the tensors of this rank's state that are not shared, each with its future place and where it is now.

        And how many bytes they need.
        """
        new: list[tuple[Entry, torch.Tensor, dict[str, Any]]] = []
        place = 0
        for position, parameter in owned:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or self._own.get((position, key)) is value:
                    continue
                dense = torch.empty_like(value, device="meta")
                entry = Entry(position, key, tuple(value.shape), dense.stride(), value.dtype, place)
                new.append((entry, value, state))
                place += rounded_up(value.nbytes, LINE_BYTES)
        return new, place

    def show_others(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """Show the state of the other ranks' parameters in ``optimizer.state``, in one order on every rank."""
        for position, parameter in enumerate(parameters):
            own = optimizer.state.pop(parameter, None)
            state = own
            if position in self._of_others:
                numbers = {key: one for key, one in (own or {}).items() if not isinstance(one, torch.Tensor)}
                state = {**numbers, **self._of_others[position]}
            if state is not None:
                optimizer.state[parameter] = state

    def forget_writes(self) -> None:
        """Drop what this rank's script has written into views of the others' state: the owners wrote it too."""
        for view in self._views:
            if view.written_pages().size:
                view.forget()

    @torch.no_grad()
    def take_own_copy(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """Give this rank memory of its own for all of it."""
        for position, parameter in enumerate(parameters):
            state = optimizer.state.get(parameter)
            is_other = position in self._of_others
            for key, value in dict(state or {}).items():
                if isinstance(value, torch.Tensor) and (is_other or self._own.get((position, key)) is value):
                    optimizer.state[parameter][key] = value.clone()
        self._forget()

    def keep_view(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """Have this rank's part be a private view too: no other rank sees later steps."""
        for (position, key), shared in self._own.items():
            state = optimizer.state.get(parameters[position], {})
            if state.get(key) is shared:
                state[key] = self._own_views[position, key]
        self._forget()

    def _forget(self) -> None:
        self._own.clear()
        self._own_views.clear()
        self._of_others.clear()
        self._views.clear()
        self._seen = SeenState()


def _tensor(memory: Any, entry: Entry, start: int) -> torch.Tensor:
    count = torch.Size(entry.shape).numel()
    flat: torch.Tensor = memory.tensor(start + entry.start, [count], entry.dtype)
    return flat.as_strided(entry.shape, entry.stride, flat.storage_offset())
