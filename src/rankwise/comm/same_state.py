# SPDX-License-Identifier: Apache-2.0
"""Do the ranks hold the same? When they compare, how what they hold travels, and how a difference is described.

Digests are those of ``tensors/checksum``; :class:`CheckSchedule` says when ranks compare. A
collective is the carrier where all ranks call anyway; the job's store (:class:`Posted`) where no rank may wait for
another: the last rank to post compares. Knows no model, loader or strategy.
"""

from __future__ import annotations

import gc
import json
import math
import zlib
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from rankwise.tensors.checksum import FLOOR, are_equal, is_rounding, is_same_setting, short, tolerance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.session import Session
    from rankwise.store.client import Store

    Summary = Sequence[float]
    """What :func:`rankwise.tensors.checksum.summary_of` returns, perhaps read from JSON."""

T = TypeVar("T")

STORE_READ_SECONDS = 10.0
"""How long the store may take to return a key that is set."""
_ONE_RANK = 2**40
"""A sum of short checksums has, above its bits, the number of ranks that have added theirs: in one message."""
CHUNK_ELEMENTS = 2**22
"""How much of a tensor is exchanged at a time."""
MOST_NAMES = 5
REPLICATES = "DistributedDataParallel"
SPREADS = "FullyShardedDataParallel"
"""torch's own wrappers, by name: importing them would load what the script does not use."""


class CheckSchedule:
    """The steps of one comparison: the first ``num_first``, then twice as far each time, up to ``every`` apart."""

    def __init__(self, num_first: int, every: int) -> None:
        self.next = 0
        """The next step that is due, from 0."""
        self._num_first = num_first
        self._every = every
        self._least = 1

    def is_due(self, step: int) -> bool:
        """Return whether ranks compare in ``step``, and note that they have."""
        if step < self.next:
            return False
        self.advance(step)
        return True

    def advance(self, step: int) -> None:
        """Note that ranks have compared in ``step``."""
        apart = 1 if step < self._num_first else min(step, self._every)
        self.next = step + max(apart, self._least)

    def be_patient(self, most: int) -> None:
        """Compare half as often from now on, down to every ``most`` steps: the difference was harmless."""
        self._least = min(max(2 * self._least, 16), most)


# -- through the store ------------------------------------------------------------------------------


class Posted:
    """What some ranks post under keys, which are the same on all of them. Each key is used once."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int]) -> None:
        self.store = store
        self._rank = rank
        self._ranks = list(ranks)
        self._num_gathered = 0

    @classmethod
    def of(cls, session: Session, prefix: str, ranks: Sequence[int] = ()) -> Posted | None:
        """Return what ``ranks``, or all, post under ``prefix``; ``None`` if there is no store."""
        world, store = session.world, session.store
        return None if store is None else cls(store.prefixed(prefix), world.rank, ranks or range(world.world_size))

    @classmethod
    def of_exchange(cls, exchange: Exchange, session: Session, prefix: str) -> Posted | None:
        """Return what the ranks of ``exchange`` post under ``prefix``; ``None`` if there is no store.

        Called by: every rank of ``exchange``.
        """
        ranks = list(range(session.world.world_size))
        if exchange.world_size < len(ranks):
            own = torch.tensor([session.world.rank])
            ranks = exchange.all_gather(own, what="ranks with a copy").flatten().tolist()
        return cls.of(session, f"{prefix}-{ranks[0]}", ranks)

    def reports(self, key: str, own: object) -> dict[int, Any] | None:
        """Post a report in JSON-able form; return the reports of all ranks, by rank, on the last rank to post."""
        part = self.store.prefixed(key)
        part.set(str(self._rank), json.dumps(own))
        if part.add("count", 1) < len(self._ranks):
            return None
        found = self._read(part)
        for name in (*map(str, self._ranks), "count"):
            part.delete(name)
        return found

    def gather(self, own: object, barrier: Callable[[], object]) -> dict[int, Any]:
        """Post a report in JSON-able form; return the reports of all ranks, by rank, once ``barrier`` has returned.

        Called by: every rank, in the same order.
        """
        self._num_gathered += 1
        part = self.store.prefixed(f"gathered/{self._num_gathered}")
        part.set(str(self._rank), json.dumps(own))
        barrier()
        return self._read(part)

    def _read(self, part: Store) -> dict[int, Any]:
        return {rank: json.loads(part.get(str(rank), STORE_READ_SECONDS)) for rank in self._ranks}

    def are_alike(self, key: str, checksum: int) -> bool | None:
        """Post a checksum; return whether those of all ranks are the same, on the last rank to post."""
        part = self.store.prefixed(key)
        code = short(checksum)
        part.add("squares", code * code)
        count, total = divmod(part.add("sum", _ONE_RANK + code), _ONE_RANK)
        if count < len(self._ranks):
            return None
        squares = part.add("squares", 0)
        part.delete("squares")
        part.delete("sum")
        return are_equal(len(self._ranks), total, squares)

    def earlier(self, key: str, own: object) -> tuple[int, Any] | None:
        """Post a report unless another rank has; return that rank and its report, or ``None`` if none has."""
        posted = json.dumps([self._rank, own])
        held = self.store.held_or_set(key, posted)
        return None if held == posted.encode() else tuple(json.loads(held))

    def is_first(self, key: str) -> bool:
        """Return whether this is the first call for ``key`` on any rank: to report a difference once per job."""
        return self.store.add(key, 1) == 1


# -- through a collective ---------------------------------------------------------------------------


def numbers_of_all(exchange: Exchange, own: Sequence[int], what: str) -> list[list[int]]:
    """Return the integers of each rank, as many on each. Called by: every rank of ``exchange``."""
    return exchange.all_gather(torch.tensor(own), what=what).view(-1, len(own)).tolist()


def furthest_apart(tensor: torch.Tensor, exchange: Exchange, *, name: str, largest: float) -> int | None:
    """Return the index of the element that ranks differ most in; ``None`` if they differ by rounding at most.

    ``largest`` is the largest element of the model. Called by: every rank of ``exchange``, with the same result.
    """
    apart, index = _furthest_from_first(tensor.reshape(-1), exchange, name)
    own = torch.tensor([apart, float(index), largest_element(tensor)], dtype=torch.float64)
    rows = exchange.all_gather(own, what=f"the difference of {name}").tolist()
    furthest = max(rows, key=lambda row: row[0])
    allowed = tolerance(tensor.dtype) * max(FLOOR * largest, *(row[2] for row in rows))
    return int(furthest[1]) if furthest[0] > allowed else None


def _furthest_from_first(flat: torch.Tensor, exchange: Exchange, name: str) -> tuple[float, int]:
    """Return the largest difference of this rank's values from the first rank's, and its index: NaN equals NaN."""
    furthest, place = 0.0, 0
    for start in range(0, flat.numel(), CHUNK_ELEMENTS):
        own = flat[start : start + CHUNK_ELEMENTS].contiguous()
        first = exchange.broadcast(own, 0, what=f"{name} of the first rank")
        apart, index = furthest_from(own, first)
        if apart > furthest:
            furthest, place = apart, start + index
    return furthest, place


def furthest_from(own: torch.Tensor, first: torch.Tensor) -> tuple[float, int]:
    """Return the largest difference of two tensors of one dim, and its index: NaN equals NaN."""
    if not own.numel():
        return 0.0, 0
    wide = torch.complex128 if own.is_complex() else torch.float64
    mine, other = own.cpu().to(wide), first.cpu().to(wide)
    is_equal = (mine == other) | (mine.isnan() & other.isnan())
    apart = torch.where(is_equal, 0.0, (mine - other).abs()).nan_to_num(nan=math.inf)
    index = int(apart.argmax())
    return float(apart[index]), index


def largest_element(tensor: torch.Tensor) -> float:
    """Return the largest finite element of a tensor, without its sign."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return float(tensor.abs().nan_to_num(nan=0.0, posinf=0.0).max())


# -- what differs between the reports of ranks ------------------------------------------------------


def listed(names: Sequence[str]) -> str:
    """Return the first of several names, for an error."""
    return ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")


def first_unlike_setting(
    of_ranks: Iterable[Sequence[Mapping[str, Any]]],
) -> tuple[int, str, list[object]] | None:
    """Return the first setting that differs: its place in the lists, its key, and the value of each rank.

    Args:
        of_ranks: for each rank a list of settings by key, such as those of parameter groups. A key or an entry that a
            rank lacks counts as equal to the first rank's.
    """
    first, *others = of_ranks
    for number, settings in enumerate(first):
        rows = [settings, *(other[number] if number < len(other) else {} for other in others)]
        for key, value in settings.items():
            held = [row.get(key, value) for row in rows]
            if any(not is_same_setting(one, value) for one in held):
                return number, key, held
    return None


def unlike_summaries(of_ranks: Iterable[Sequence[Summary | None]], dtypes: Iterable[torch.dtype]) -> list[int]:
    """Return the places of the summaries that differ from the first rank's by more than rounding.

    Args:
        of_ranks: for each rank the summaries of its tensors, ``None`` for a tensor that it lacks.
        dtypes: of these tensors.
    """
    found: list[int] = []
    for number, (dtype, (first, *others)) in enumerate(zip(dtypes, zip(*of_ranks, strict=True), strict=True)):
        for other in others:
            if first is None or other is None:
                is_same = first is other
            else:
                is_same = is_rounding((first[0], first[1]), (other[0], other[1]), tolerance(dtype))
            if not is_same:
                found.append(number)
                break
    return found


# -- whose a tensor is ------------------------------------------------------------------------------


# torch shows which tensors an optimizer has stepped, but not which module or wrapper they belong to: that is found
# through the garbage collector.


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
