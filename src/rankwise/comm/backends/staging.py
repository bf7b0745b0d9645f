# SPDX-License-Identifier: Apache-2.0
"""Collectives through a small piece of memory that all ranks of a host share, piece by piece.

Every rank has a few slots. In a round each fills one of its own and reads everyone's; while the others read one
slot, the next is filled. Tensors are reduced in rank order, in half precision summed in float32 and rounded once.
Legend: L ranks of the host.
"""

from __future__ import annotations

import time
import zlib
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rankwise.comm.backends.engine import Counters
from rankwise.comm.backends.mapping import LINE_BYTES, WORD_BYTES
from rankwise.comm.backends.pending_collective import handle_of
from rankwise.comm.backends.torch_channels import HALF_PRECISION
from rankwise.comm.backends.torch_group import REDUCE_OPS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rankwise.comm.backends.engine import Awaited
    from rankwise.comm.backends.mapping import Mapping

    ReadPiece = Callable[[list[torch.Tensor], int, int, int], Generator[Awaited] | None]
    """Reads a piece from the slots of all ranks: its round, its first element and the one after its last. What it
    returns is done before the slots may be filled again."""

NUM_SLOTS = 2
ALONE_BYTES = 2**15
"""Up to this size a rank reduces everything itself, rather than wait a second time."""


_PIECE_ELEMENTS = 2**18
_REAL = (torch.float64, torch.float32, *HALF_PRECISION, torch.int64, torch.int32, torch.int8, torch.uint8)
_COMPLEX = (torch.complex64, torch.complex128)
_STEPS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
REDUCIBLE = {op: frozenset({*_REAL, torch.bool, *(_COMPLEX if op == "sum" else ())}) for op in _STEPS}
"""By operation, the dtypes that every exchange can reduce: a limit of Gloo must not show up only on several hosts."""


class CallsDiffer(Exception):
    """Ranks of this host have reached different calls; nothing was sent."""


class Staging:
    """The slots of all ranks of a host, and the progress of each. Every call is a generator for the engine."""

    def __init__(self, mapping: Mapping, start: int, slot_bytes: int, rank: int, num_ranks: int) -> None:
        self.slot_bytes = slot_bytes
        self._rank = rank
        self._num_ranks = num_ranks
        counters_bytes = Counters.num_bytes(num_ranks)
        self._published = Counters(mapping, start, rank, num_ranks)
        self._reduced = Counters(mapping, start + counters_bytes, rank, num_ranks)
        self._consumed = Counters(mapping, start + 2 * counters_bytes, rank, num_ranks)
        self._words = mapping.words
        digests = (start + 3 * counters_bytes) // WORD_BYTES
        line_words = LINE_BYTES // WORD_BYTES
        self._digests = [
            [digests + line_words * other + slot for slot in range(NUM_SLOTS)] for other in range(num_ranks)
        ]
        first = start + 3 * counters_bytes + LINE_BYTES * num_ranks
        self._bytes = [
            [
                mapping.tensor(first + (other * NUM_SLOTS + slot) * slot_bytes, [slot_bytes], torch.uint8)
                for other in range(num_ranks)
            ]
            for slot in range(NUM_SLOTS)
        ]
        """By slot and rank."""
        self._typed = {torch.uint8: self._bytes}
        # Bytes that are copied through a tensor take three times as long.
        self._views = [[memoryview(slot.numpy()) for slot in slots] for slots in self._bytes]  # type: ignore[arg-type]
        self._round = 0

    @staticmethod
    def num_bytes(slot_bytes: int, num_ranks: int) -> int:
        """Return how much memory it all takes."""
        return num_ranks * (NUM_SLOTS * slot_bytes + LINE_BYTES) + 3 * Counters.num_bytes(num_ranks)

    @staticmethod
    def own_part(start: int, slot_bytes: int, rank: int, num_ranks: int) -> tuple[int, int]:
        """Return start and length of the part that mostly ``rank`` writes."""
        own_bytes = NUM_SLOTS * slot_bytes
        return start + 3 * Counters.num_bytes(num_ranks) + LINE_BYTES * num_ranks + rank * own_bytes, own_bytes

    def barrier(self, what: str) -> Generator[Awaited]:
        """Continue when every rank has arrived.

        Raises:
            CallsDiffer: not every rank has reached ``what``; here and in the calls below.
        """
        return self.gather_notes(what, b"", [])

    def gather_notes(self, what: str, note: bytes, found: list[bytes]) -> Generator[Awaited]:
        """Add the note of every rank to ``found``; they have one length, which fits a slot."""
        self._round = round_ = self._round + 1
        views, size = self._views[round_ % NUM_SLOTS], len(note)
        yield self._consumed, round_ - NUM_SLOTS
        views[self._rank][:size] = note
        self._publish_first(round_, what)
        yield self._published, round_
        self._check_calls(round_, what)
        found += map(bytes, map(itemgetter(slice(size)), views))
        self._consumed.post(round_)

    def all_reduce(
        self, what: str, tensor: torch.Tensor, out: torch.Tensor, op: str, cross_host: CrossHostGroup | None = None
    ) -> Generator[Awaited]:
        """Reduce ``tensor`` [n] over the ranks into ``out`` [n], and over the hosts if there is ``cross_host``."""
        # On one host, two ranks, or more ranks with little data, do not wait a second time.
        alone = cross_host is None and (self._num_ranks == 2 or tensor.nbytes <= ALONE_BYTES)  # noqa: PLR2004

        def read(slots: list[torch.Tensor], round_: int, low: int, high: int) -> Generator[Awaited] | None:
            slots = list(map(itemgetter(slice(high - low)), slots))
            if not alone:
                return self._reduce_in_slices(slots, out[low:high], op, round_, cross_host)
            reduce_into(out[low:high], slots, op)
            return None

        return self._in_pieces(what, tensor, read)

    def _reduce_in_slices(
        self, slots: list[torch.Tensor], out: torch.Tensor, op: str, round_: int, cross_host: CrossHostGroup | None
    ) -> Generator[Awaited]:
        """Reduce a slice, where this rank owns one, and copy the slices of all owners into ``out``."""
        num_slices = self._num_ranks if cross_host is None else cross_host.num_slices
        length = -(-len(out) // num_slices)
        slices = [slice(owner * length, (owner + 1) * length) for owner in range(num_slices)]
        if self._rank < num_slices:
            own = slices[self._rank]
            reduce_into(out[own], [slot[own] for slot in slots], op)
            # Only its owner reads this slice of this slot.
            slots[self._rank][own].copy_(out[own])
            if cross_host is not None:
                yield from cross_host.all_reduce_(cross_host.take_turn(), [slots[self._rank][own]], op)
        self._reduced.post(round_)
        yield self._reduced, round_
        for owner, slice_ in enumerate(slices):
            out[slice_].copy_(slots[owner][slice_])

    def all_gather(self, what: str, tensor: torch.Tensor, out: torch.Tensor) -> Generator[Awaited]:
        """Collect ``tensor`` [n], bytes, of every rank in ``out`` [L, n]."""

        def read(slots: list[torch.Tensor], _: int, low: int, high: int) -> None:
            for row, slot in zip(out, slots, strict=True):
                row[low:high].copy_(slot[: high - low])

        return self._in_pieces(what, tensor, read)

    def broadcast(self, what: str, tensor: torch.Tensor, out: torch.Tensor, source: int) -> Generator[Awaited]:
        """Copy ``tensor`` [n], bytes, of rank ``source`` to every rank's ``out`` [n]."""

        def read(slots: list[torch.Tensor], _: int, low: int, high: int) -> None:
            out[low:high].copy_(slots[source][: high - low])

        return self._in_pieces(what, tensor, read, fills=self._rank == source)

    def all_to_all(
        self, what: str, tensor: torch.Tensor, out: torch.Tensor, sizes: Sequence[Sequence[int]]
    ) -> Generator[Awaited]:
        """Copy the part of every rank's ``tensor``, bytes, that is for this rank into ``out``.

        ``sizes`` are bytes from each rank (outer) to each. ``tensor`` is [sum of ``sizes[this rank]``], the first
        rank's part first, and ``out`` [sum of ``sizes[every rank][this rank]``].
        """
        starts = [sum(row[: self._rank]) for row in sizes]
        ends = [start + row[self._rank] for start, row in zip(starts, sizes, strict=True)]
        places = list(accumulate((row[self._rank] for row in sizes), initial=0))

        def read(slots: list[torch.Tensor], _: int, low: int, high: int) -> None:
            for source, slot in enumerate(slots):
                first, last = max(starts[source], low), min(ends[source], high)
                if first < last:
                    place = places[source] + first - starts[source]
                    out[place : place + last - first].copy_(slot[first - low : last - low])

        return self._in_pieces(what, tensor, read, most=max(map(sum, sizes)))

    def _in_pieces(
        self, what: str, tensor: torch.Tensor, read: ReadPiece, *, fills: bool = True, most: int | None = None
    ) -> Generator[Awaited]:
        """Fill a slot per piece of ``tensor`` [n], and ``read`` each when every rank has filled its own.

        ``fills``: whether this rank has anything to send. ``most``: the largest n of any rank, if they differ.
        """
        typed = self._typed.get(tensor.dtype)
        if typed is None:
            typed = self._typed[tensor.dtype] = [[slot.view(tensor.dtype) for slot in slots] for slots in self._bytes]
        length = self.slot_bytes // tensor.element_size()
        num_elements = tensor.numel() if most is None else most
        filled: tuple[int, int, int] | None = None
        for low in (*range(0, max(num_elements, 1), length), None):
            last, filled = filled, None
            if low is not None:
                self._round = round_ = self._round + 1
                filled = round_, low, min(low + length, num_elements)
                yield self._consumed, round_ - NUM_SLOTS
                if fills:
                    piece = tensor[low : low + length]
                    typed[round_ % NUM_SLOTS][self._rank][: len(piece)].copy_(piece)
                if low == 0:
                    self._publish_first(round_, what)
                    yield self._published, round_
                    self._check_calls(round_, what)
                else:
                    self._published.post(round_)
            if last is not None:
                if last[1]:
                    yield self._published, last[0]
                steps = read(typed[last[0] % NUM_SLOTS], *last)
                if steps is not None:
                    yield from steps
                self._consumed.post(last[0])

    def _publish_first(self, round_: int, what: str) -> None:
        self._words[self._digests[self._rank][round_ % NUM_SLOTS]] = zlib.crc32(what.encode())
        self._published.post(round_)

    def _check_calls(self, round_: int, what: str) -> None:
        slot = round_ % NUM_SLOTS
        digest = self._words[self._digests[self._rank][slot]]
        for places in self._digests:
            if self._words[places[slot]] != digest:
                self._consumed.post(round_)
                raise CallsDiffer(what)


# -- between hosts -------------------------------------------------------------------------------------

_POLL_SECONDS = 100e-6
"""torch's own wait with a timeout ends in an exception, which costs more."""


class _PolledProgress:
    """Waits for a condition that no rank of this host posts: there is no word of memory to sleep on."""

    def __init__(self, is_met: Callable[[], bool]) -> None:
        self._is_met = is_met

    def reach(self, value: int) -> bool:
        return self._is_met() >= value

    def sleep_until(self, _: int, seconds: float) -> None:
        """Sleep for a moment; all other pending operations are advanced afterwards."""
        time.sleep(min(seconds, _POLL_SECONDS))

    def last(self, _: int) -> int | None:
        return None


class CrossHostGroup:
    """The ranks that own one slice, one on each host. Sends in the order in which turns were taken."""

    def __init__(self, group: dist.ProcessGroup | None, num_slices: int) -> None:
        self.num_slices = num_slices
        self.num_sent = 0
        self._group = group
        self._num_turns = 0

    @classmethod
    def open(cls, hosts: Sequence[Sequence[int]], rank: int) -> CrossHostGroup:
        """Open the groups of all slices and return that of ``rank``.

        Called by: every rank of the world, with the ranks of each host.
        """
        own = None
        for owners in zip(*hosts, strict=False):
            group = dist.new_group(list(owners))
            if rank in owners and isinstance(group, dist.ProcessGroup):
                own = group
        return cls(own, min(map(len, hosts)))

    def take_turn(self) -> int:
        """Return a place in the order of sending."""
        self._num_turns += 1
        return self._num_turns - 1

    def all_reduce_(self, turn: int, tensors: Sequence[torch.Tensor], op: str = "sum") -> Generator[Awaited]:
        """Reduce tensors over the hosts, in place."""
        yield _PolledProgress(lambda: self.num_sent >= turn), True
        try:
            works = [
                handle_of(dist.all_reduce(tensor, REDUCE_OPS[op], group=self._group, async_op=True))
                for tensor in tensors
            ]
        finally:
            self.num_sent += 1
        for work in works:
            yield _PolledProgress(work.is_completed), True
            work.wait()  # raises its error


# -- reductions ----------------------------------------------------------------------------------------


def reduce_into(out: torch.Tensor, parts: Sequence[torch.Tensor], op: str) -> None:
    """Reduce ``parts`` into ``out``; all of one shape [n] and dtype. ``out`` is not one of them, except the first."""
    step = _STEPS[op]
    if out.dtype not in HALF_PRECISION:
        step(parts[0], parts[1], out=out) if len(parts) > 1 else out.copy_(parts[0])
        for part in parts[2:]:
            step(out, part, out=out)
        return
    for piece in pieces_of(out, parts):
        total = piece[1].float()
        for part in piece[2:]:
            step(total, part, out=total)
        piece[0].copy_(total)


def pieces_of(out: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """Return pieces of ``out`` and of the parts that a core's cache holds together."""
    return list(zip(out.split(_PIECE_ELEMENTS), *(part.split(_PIECE_ELEMENTS) for part in parts), strict=True))
