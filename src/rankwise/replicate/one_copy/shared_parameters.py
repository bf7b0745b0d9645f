# SPDX-License-Identifier: Apache-2.0
"""The parameters of one model in memory that the ranks of a host share, each parameter with an owner among them.

A rank sees them through a private view of that memory. So what its script writes outside an optimizer changes this rank
alone, as if it had a copy; before the next update the owners write such changes into the shared memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakSet

import numpy as np
import torch

from rankwise.comm.backends.mapping import LINE_BYTES, PAGE_BYTES, WORD_BYTES, rounded_up
from rankwise.errors import ReplicasDiffer, fold_values
from rankwise.replicate.bucket import divide_by_size
from rankwise.tensors.checksum import checksums_of_each, combined

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn
    from torch.optim.optimizer import Optimizer

    from rankwise.comm.backends.engine import HostMemory
    from rankwise.comm.backends.mapping import Mapping, PrivateView, ViewPart


@dataclass(frozen=True)
class ParameterLayout:
    """Where each parameter lies, and which rank of the host owns it."""

    owners: list[int]
    """By number of the parameter, a local rank."""
    starts: list[int]
    """By number of the parameter, its first byte."""
    parts: list[tuple[int, int]]
    """By local rank, the start and length of what it owns."""
    end: int

    @property
    def record(self) -> tuple[int, int]:
        """The start and length of the record that undoes a step, laid out as the parameters are."""
        return self.end, self.end - self.parts[0][0]

    def parts_of(self, local_rank: int) -> list[tuple[int, int]]:
        """Return the starts and lengths of what a rank writes: what it owns, and its part of the record."""
        start, length = self.parts[local_rank]
        return [(start, length), (start + self.record[1], length)]

    @classmethod
    def of(cls, parameters: Sequence[torch.Tensor], num_owners: int, start: int) -> ParameterLayout:
        """Divide parameters about equally by their bytes, from byte ``start`` on."""
        # Frozen parameters are not updated, so any rank may own them.
        sizes = [one.nbytes if one.requires_grad else 0 for one in parameters]
        owners, starts, parts = [0] * len(parameters), [0] * len(parameters), []
        place = rounded_up(start, PAGE_BYTES)
        for owner, numbers in enumerate(divide_by_size(sizes, num_owners)):
            first = place
            for number in numbers:
                owners[number], starts[number] = owner, place
                place += rounded_up(parameters[number].nbytes, LINE_BYTES)
            place = rounded_up(place, PAGE_BYTES)
            parts.append((first, place - first))
        return cls(owners, starts, parts, place)


class SharedParameters:
    """The parameters of one model, from ``replicate`` until the model is deleted or each rank takes its own copy.

    Its many fields are the parameters and where each lies: in the shared memory, in the view, in the record, and in a
    copy.
    """

    def __init__(
        self,
        model_name: str,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        memory: HostMemory,
        layout: ParameterLayout,
        *,
        is_wanted: bool,
    ) -> None:
        """Write this rank's part into the memory. The others must have done so before :meth:`show`."""
        view = memory.mapping.private
        if view is None:
            message = "the memory has no private view"
            raise OSError(message)
        self.model_name = model_name
        self.names = list(names)
        self.parameters = list(parameters)
        self.is_wanted = is_wanted
        """Whether the script insists on one copy."""
        self.local_rank = memory.local_rank
        self.owners = layout.owners
        self.number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._view: ViewPart | None = view.part(layout.parts[0][0], layout.end - layout.parts[0][0])
        self._starts = np.array(layout.starts)
        self._ends = self._starts + np.array([one.nbytes for one in parameters])
        self._shared = [
            _place(memory.mapping, start, one) for start, one in zip(layout.starts, parameters, strict=True)
        ]
        self._private = [_place(view, start, one) for start, one in zip(layout.starts, parameters, strict=True)]
        self._addresses = [one.data_ptr() for one in self._private]
        self._copies: list[torch.Tensor] | None = None
        self._first = layout.parts[0][0]
        start, num_bytes = layout.record
        self._record = memory.mapping.tensor(start, [num_bytes // WORD_BYTES], torch.int64)
        self._seen = view.tensor(layout.parts[0][0], [num_bytes // WORD_BYTES], torch.int64)
        """All of the view."""
        self._unrecorded = self._owned()
        """What has changed since it was recorded."""
        self._pieces = _Pieces([], [])
        for number in self._owned():
            self._shared[number].copy_(self.parameters[number].detach())
        _shared_by_this_process.add(self)

    @property
    def is_shared(self) -> bool:
        """Whether ranks still share them."""
        return self._view is not None

    def show(self) -> None:
        """Have the parameters be views of the memory. Called once every rank has written its part."""
        for parameter, private in zip(self.parameters, self._private, strict=True):
            parameter.data = private

    def named(self, numbers: Iterable[int] | None = None) -> dict[str, nn.Parameter]:
        """Return parameters by their names in messages; by default all."""
        return {
            f"{self.names[number]} of {self.model_name}": self.parameters[number]
            for number in (range(len(self.names)) if numbers is None else numbers)
        }

    def _owned(self) -> list[int]:
        return [number for number, owner in enumerate(self.owners) if owner == self.local_rank]

    # -- what the script has changed ---------------------------------------------------------------

    def moved(self) -> str | None:
        """Return the name of a parameter that the script has given other memory."""
        now = [parameter.data_ptr() for parameter in self.parameters]
        if now == self._addresses:
            return None
        return next(name for name, a, b in zip(self.names, now, self._addresses, strict=True) if a != b)

    def written(self) -> list[int]:
        """Return the numbers of the parameters that this rank's script may have written since :meth:`publish`."""
        if self._view is None:
            return []
        pages = self._view.written_pages()
        if not pages.size:
            return []
        firsts, lasts = self._starts // PAGE_BYTES, (self._ends - 1) // PAGE_BYTES
        is_written = np.searchsorted(pages, firsts) < np.searchsorted(pages, lasts, side="right")
        return [int(number) for number in np.flatnonzero(is_written)]

    @torch.no_grad()
    def publish(self, numbers: Sequence[int]) -> None:
        """Write this rank's values of those that it owns into the shared memory, and show that memory again.

        Called by: every rank of the host, with the same numbers, between two meetings.
        """
        if self._view is None:
            return
        self._copies = None
        for number in numbers:
            if self.owners[number] == self.local_rank:
                self._shared[number].copy_(self._private[number])
        self._view.forget()

    # -- while an optimizer updates them -----------------------------------------------------------

    @torch.no_grad()
    def record(self, written: Sequence[int]) -> None:
        """Record the values of this rank's parameters before a step, as this rank sees them.

        Called by: every rank of the host, before the meeting that precedes the step.

        Args:
            written: the numbers of the parameters that the script has written.
        """
        if written:
            own = {number for number in written if self.owners[number] == self.local_rank}
            self._unrecorded = sorted(own.union(self._unrecorded))
        if self._pieces.numbers != self._unrecorded:
            self._pieces = self._pieces_of(self._unrecorded)
        for record, seen in self._pieces.pairs:
            record.copy_(seen)
        self._unrecorded = []

    def _pieces_of(self, numbers: list[int]) -> _Pieces:
        """Return the places of parameters in the record and in the view, as few and as large as possible."""
        bounds: list[list[int]] = []
        for number in sorted(numbers):
            start = int(self._starts[number]) - self._first
            end = rounded_up(int(self._ends[number]) - self._first, LINE_BYTES)
            if bounds and bounds[-1][1] == start:
                bounds[-1][1] = end
            else:
                bounds.append([start, end])
        places = [slice(start // WORD_BYTES, end // WORD_BYTES) for start, end in bounds]
        return _Pieces(numbers, [(self._record[place], self._seen[place]) for place in places])

    @torch.no_grad()
    def undo(self) -> None:
        """Have the values be those from before the step, in memory of this rank, at the same addresses.

        Every rank of the host must have reached the meeting before the step, and not all of them the one after it:
        then no rank writes the record any more.
        """
        if self._view is not None:
            self._seen.copy_(self._record)
            self._stop_sharing()

    def open_for_update(self, numbers: Sequence[int]) -> None:
        """Have parameters of this rank be the shared memory itself."""
        self._copies = None
        # Optimizers leave alone what has no gradient.
        self._unrecorded = [number for number in numbers if self.parameters[number].grad is not None]
        for number in numbers:
            self.parameters[number].data = self._shared[number]

    def close_after_update(self, numbers: Sequence[int]) -> None:
        """Have them be views again."""
        for number in numbers:
            self.parameters[number].data = self._private[number]

    # -- the end of sharing ------------------------------------------------------------------------

    @torch.no_grad()
    def take_own_copy(self) -> None:
        """Give this rank memory of its own for every parameter, with the values that it sees."""
        for parameter, address in zip(self.parameters, self._addresses, strict=True):
            if parameter.data_ptr() == address:
                parameter.data = parameter.detach().clone()
        self._stop_sharing()

    def keep_view(self) -> None:
        """Leave the parameters as they are, and share no more: no rank updates them any more."""
        self._stop_sharing()

    def _stop_sharing(self) -> None:
        self._view = None
        self._shared, self._private = [], []
        self._copies = None
        self._pieces = _Pieces([], [])
        self._record = self._seen = torch.empty(0, dtype=torch.int64)

    # -- copies ------------------------------------------------------------------------------------

    @torch.no_grad()
    def make_copy(self) -> None:
        """Copy the values as they are, for :meth:`use_copy`. Called by a process about to be forked."""
        if self._view is None:
            return
        # What the script has written since the last step may have changed since the last copy.
        if self._copies is None or self.moved() is not None or self.written():
            self._copies = [parameter.detach().clone() for parameter in self.parameters]

    def use_copy(self) -> None:
        """Have the parameters be the copy, which no other rank updates."""
        if self._view is not None and self._copies is not None:
            for parameter, copied in zip(self.parameters, self._copies, strict=True):
                parameter.data = copied
            self._stop_sharing()


class _Pieces(NamedTuple):
    """Where some parameters lie, each piece twice: in the record and in the view."""

    numbers: list[int]
    pairs: list[tuple[torch.Tensor, torch.Tensor]]


_shared_by_this_process: WeakSet[SharedParameters] = WeakSet()


def _before_fork() -> None:
    for one in list(_shared_by_this_process):
        one.make_copy()


def _after_fork() -> None:
    for one in list(_shared_by_this_process):
        one.use_copy()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def _place(memory: Mapping | PrivateView, start: int, parameter: torch.Tensor) -> torch.Tensor:
    """Return the place of a parameter in memory, in its own memory format."""
    flat = memory.tensor(start, [parameter.numel()], parameter.dtype)
    return flat.as_strided(parameter.size(), parameter.stride(), flat.storage_offset())


def why_not_shared(names: Sequence[str], parameters: Sequence[torch.Tensor]) -> str:
    """Return why parameters cannot lie in shared memory; empty if they can."""
    held: dict[int, str] = {}
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.device.type != "cpu":
            return f"{name} is on {parameter.device}"
        if type(parameter.data) is not torch.Tensor or parameter.layout is not torch.strided:
            return f"{name} is not a plain tensor"
        if parameter.numel() and not _is_dense(parameter):
            return f"{name} is a view with gaps"
        address = parameter.untyped_storage().data_ptr()
        if parameter.numel() and held.setdefault(address, name) != name:
            return f"{name} and {held[address]} share memory"
    return ""


def _is_dense(parameter: torch.Tensor) -> bool:
    expected = cast("Any", torch.empty_like(parameter, device="meta")).stride()
    return parameter.stride() == expected and parameter.untyped_storage().nbytes() >= parameter.nbytes


@dataclass(frozen=True, slots=True)
class Division:
    """Which parameters of an optimizer this rank updates. Valid as long as the optimizer's groups are the same."""

    models: list[SharedParameters]
    parameters: list[torch.Tensor]
    """All of the optimizer."""
    groups: list[list[torch.Tensor]]
    """The parameters of each group."""
    own_groups: list[list[torch.Tensor]]
    """Of each group, those that are left to the optimizer of this rank."""
    own: list[tuple[int, torch.Tensor]]
    """Those that this rank updates for all, with their positions among all of the optimizer."""
    numbers: list[list[int]]
    """The same by model, by their numbers in it."""
    of_others: list[torch.Tensor]
    unshared: list[torch.Tensor]
    """Those of no model: each rank updates its own."""

    @classmethod
    def of(cls, optimizer: Optimizer, models: list[SharedParameters]) -> Division:
        """Divide the parameters of an optimizer among the ranks of the host."""
        groups = [group["params"] for group in optimizer.param_groups]
        parameters = [one for group in groups for one in group]
        numbers: list[list[int]] = [[] for _ in models]
        own: list[tuple[int, torch.Tensor]] = []
        others: dict[int, torch.Tensor] = {}
        for position, parameter in enumerate(parameters):
            for model, of_model in zip(models, numbers, strict=True):
                number = model.number_of.get(id(parameter))
                if number is None:
                    continue
                if model.owners[number] == model.local_rank:
                    own.append((position, parameter))
                    of_model.append(number)
                else:
                    others[id(parameter)] = parameter
        own_groups = [[one for one in group if id(one) not in others] for group in groups]
        shared = {id(one) for _, one in own} | others.keys()
        unshared = [one for one in parameters if id(one) not in shared]
        return cls(models, parameters, groups, own_groups, own, numbers, list(others.values()), unshared)

    def is_of(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer's groups are those that were divided."""
        groups = optimizer.param_groups
        return (
            len(groups) == len(self.groups)
            and all(group["params"] is mine for group, mine in zip(groups, self.groups, strict=True))
            and sum(map(len, self.groups)) == len(self.parameters)
            and all(model.is_shared for model in self.models)
        )


# -- what ranks compare: in every step one number for each kind of tensors; where it differs, each tensor


def checksum_of(tensors: dict[str, torch.Tensor]) -> int:
    """Return a checksum of tensors and their names in messages; 0 if there are none."""
    if not tensors:
        return 0
    return combined([*map(hash_of, tensors), *checksums_of_each(list(tensors.values()))]) + 1


def details_of(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, float]]:
    """Return the checksum and the norm of each tensor, in a form for JSON."""
    checksums = checksums_of_each(list(tensors.values()))
    norms = [one.abs().double().norm().item() for one in tensors.values()]
    return dict(zip(tensors, zip(checksums, norms, strict=True), strict=True))


def hash_of(name: str) -> int:
    """Return a number for a name, the same on every rank."""
    return combined(list(name.encode()))


@dataclass(frozen=True, slots=True)
class Kind:
    """Tensors that must be the same on all ranks of a host: what they are in errors, and the fix."""

    what: str
    do: str

    def difference(self, reports: dict[int, dict[str, Any]], when: str) -> ReplicasDiffer | None:
        """Return the error for the first tensor that differs between the details of ranks, if one does."""
        for name in sorted({name for report in reports.values() for name in report}):
            found = {rank: report.get(name) for rank, report in reports.items()}
            if len({None if one is None else one[0] for one in found.values()}) > 1:
                held = {rank: "none" if one is None else f"norm {one[1]!r}" for rank, one in found.items()}
                what = f"{self.what} {name} is not the same on all ranks before {when}."
                return ReplicasDiffer(what, evidence=fold_values(held), do=self.do)
        return None


KINDS = (
    Kind(
        "Parameter", "change parameters on every rank alike: call load_state_dict() on every rank, or rankwise.load()"
    ),
    Kind(
        "The gradient of",
        "change gradients on every rank alike: by the norm of the gradients, not by a rank's own loss",
    ),
    Kind(
        "The optimizer's state of",
        "call optimizer.load_state_dict() on every rank with the same state, or rankwise.load()",
    ),
)
"""Parameters that a script has written since the last step; gradients that the step is about to use; and the state
that the optimizer has been given."""
