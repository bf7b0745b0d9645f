# SPDX-License-Identifier: Apache-2.0
"""A channel for gradients through the memory of one host, and of several.

Every rank's body lies where all can read it. Each rank sums a slice of all bodies into memory that all ranks see: the
result is a private view of it. A rank that writes into its result, as clipping does, has the result copied into memory
of its own from then on: a copy costs less than the kernel's copies of single pages. A rank need not
write its own slice: it adds its gradients to the bodies of the others.

With several hosts each of the first ranks of a host owns one slice. It reduces the slice within its host, and then with
the owners of the same slice on the other hosts, over a torch group; every rank copies all slices.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from rankwise.comm.backends.engine import Counters, Operation
from rankwise.comm.backends.mapping import LINE_BYTES, PAGE_BYTES, rounded_up
from rankwise.comm.backends.staging import pieces_of
from rankwise.comm.backends.torch_channels import HALF_PRECISION

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from rankwise.comm.backends.engine import Awaited, Engine
    from rankwise.comm.backends.mapping import Mapping, ViewPart
    from rankwise.comm.backends.protocol import ChannelSize, Piece
    from rankwise.comm.backends.staging import CrossHostGroup
    from rankwise.health.flight_recorder import Ticket


ARENA_BYTES = 2**26
"""Enough that channels of most models need not wait for each other."""
UNSLICED_BYTES = 2**16
"""Up to this size a rank sums everything itself, rather than wait a second time."""
HEADER = struct.Struct("=ddq")
"""Share, weight, number of absent flags; the flags follow."""


class ChannelLayout:
    """Where the parts of a channel lie in the memory of its host.

    ``num_slices`` is how many ranks sum a slice each: by default all, unless each sums everything itself.
    """

    def __init__(self, size: ChannelSize, num_ranks: int, num_slices: int | None = None) -> None:
        self.size = size
        self.num_ranks = num_ranks
        self.body_bytes = rounded_up(size.num_elements * size.dtype.itemsize, LINE_BYTES)
        """The part of the arena that mostly one rank writes."""
        self.is_large = self.body_bytes > UNSLICED_BYTES
        if num_slices is None:
            num_slices = num_ranks if self.is_large else 0
        self.num_slices = num_slices
        slice_bytes = -(-size.num_elements // max(num_slices, 1)) * size.dtype.itemsize
        self._slice_elements = rounded_up(slice_bytes, LINE_BYTES) // size.dtype.itemsize
        self.sum_bytes = rounded_up(self.body_bytes, PAGE_BYTES) if num_slices else 0
        self._header_bytes = rounded_up(HEADER.size + size.num_flags, LINE_BYTES)
        self.control_bytes = num_ranks * (3 * LINE_BYTES + self._header_bytes) + rounded_up(
            8 * (1 + size.num_flags), LINE_BYTES
        )
        self._control = 0
        self._bodies: list[int] = []
        self.sums = 0
        """Where the sums of all slices start, one after the other, on a page of their own."""

    def put(self, control: int, sums: int, bodies: Sequence[int]) -> None:
        """Set where the control part starts, the sums, and the body of each rank."""
        self._control = control
        self.sums = sums
        self._bodies = list(bodies)

    def counters(self, number: int) -> int:
        """Return where one of the three kinds of counters starts."""
        return self._control + number * Counters.num_bytes(self.num_ranks)

    def header(self, rank: int) -> int:
        """Return where the header of ``rank`` starts."""
        return self.counters(3) + rank * self._header_bytes

    @property
    def tail(self) -> int:
        """Where weight and flags of all hosts start, [1 + num_flags] in float64."""
        return self.header(self.num_ranks)

    def body(self, rank: int) -> int:
        """Return where the body of ``rank`` starts."""
        return self._bodies[rank]

    def own_sums(self, rank: int) -> tuple[int, int]:
        """Return the start and length of the sums that ``rank`` writes."""
        low, high = self.bounds(rank) if rank < self.num_slices else (0, 0)
        itemsize = self.size.dtype.itemsize
        return self.sums + low * itemsize, (high - low) * itemsize

    def bounds(self, slice_: int) -> tuple[int, int]:
        """Return the first element of a slice, and the first after it."""
        length, end = self._slice_elements, self.size.num_elements
        return min(slice_ * length, end), min((slice_ + 1) * length, end)

    def overlaps(self, other: ChannelLayout) -> bool:
        """Return whether the bodies share memory. A channel overlaps itself."""
        if other is self:
            return True
        end = min(layout.body(0) + layout.body_bytes for layout in (self, other))
        return max(self.body(0), other.body(0)) < end


def lay_out(layouts: Sequence[ChannelLayout], start: int) -> tuple[int, int]:
    """Assign channels their places in one piece of memory, from byte ``start`` on.

    The bodies of a rank share an arena as a ring, rather than lie side by side: channels are used one after the other,
    in the order of ``layouts``, so a model of any size needs no more.

    Returns:
        Where the arenas start, and the size of one rank's.
    """
    largest = max(layout.body_bytes for layout in layouts)
    total = sum(layout.body_bytes for layout in layouts)
    arena_bytes = rounded_up(min(total, max(ARENA_BYTES, 2 * largest)), PAGE_BYTES)
    sums = rounded_up(start + sum(layout.control_bytes for layout in layouts), PAGE_BYTES)
    arenas = sums + sum(layout.sum_bytes for layout in layouts)
    control, offset = start, 0
    for layout in layouts:
        if offset + layout.body_bytes > arena_bytes:
            offset = 0
        layout.put(control, sums, [arenas + rank * arena_bytes + offset for rank in range(layout.num_ranks)])
        control += layout.control_bytes
        sums += layout.sum_bytes
        offset += layout.body_bytes
    return arenas, arena_bytes


class SharedChannel:
    """A channel for one bucket through shared memory. See :class:`rankwise.comm.backends.protocol.BucketChannel`.

    Its many fields are views of the memory, made once so that a step makes none.
    """

    def __init__(
        self, layout: ChannelLayout, mapping: Mapping, rank: int, engine: Engine, *, what: str, exchange_id: int
    ) -> None:
        size, num_ranks = layout.size, layout.num_ranks
        self._rank = rank
        self._engine = engine
        self._what = what
        self._exchange_id = exchange_id
        self._published, self._reduced, self._consumed = (
            Counters(mapping, layout.counters(number), rank, num_ranks) for number in range(3)
        )
        header_bytes = HEADER.size + size.num_flags
        self._headers = [mapping.bytes_at(layout.header(other), header_bytes) for other in range(num_ranks)]
        self._bodies = [
            mapping.tensor(layout.body(other), [size.num_elements], size.dtype) for other in range(num_ranks)
        ]
        self.body = self._bodies[rank]
        self.result = torch.zeros(size.num_elements, dtype=size.dtype)
        self._view: ViewPart | None = None
        """Where the result is seen, unless this rank has memory of its own for it."""
        if mapping.private is not None and layout.num_slices and layout.is_large:
            self._view = mapping.private.part(layout.sums, self.result.nbytes)
            self.result = mapping.private.tensor(layout.sums, [size.num_elements], size.dtype)
        self._num_slices = layout.num_slices
        self._sums = mapping.tensor(layout.sums, [size.num_elements if layout.num_slices else 0], size.dtype)
        low, high = layout.bounds(rank) if rank < layout.num_slices else (0, 0)
        self._own_sums = self._sums[low:high]
        self._own_slices = [body[low:high] for body in self._bodies] if rank < layout.num_slices else []
        self.own = slice(low, high)
        self._pieces: Sequence[Piece] = ()
        self._all_flags = b"\1" * size.num_flags
        self._flags = self._all_flags
        self._round = 0
        self._total = 0.0
        self._sharers: list[SharedChannel] = [self]
        self._operation: Operation | None = None
        self._ticket: Ticket | None = None

    def follow(self, channels: Sequence[SharedChannel]) -> None:
        """Set the channels whose bodies share memory with this one's, itself included."""
        self._sharers = list(channels)

    def can_claim(self) -> bool:
        """Return whether every rank has read the memory's previous content, and nothing must be compared first."""
        if self._engine.detector.check is not None:
            return False
        for channel in self._sharers:
            if not channel.is_read():
                self._engine.advance()
                if not channel.is_read():
                    return False
        return True

    def claim(self) -> None:
        """Wait until every rank has read the memory's previous content."""
        for channel in self._sharers:
            if not channel.is_read():
                channel.wait_for_readers()

    def is_read(self) -> bool:
        """Return whether every rank has read the last message."""
        last = self._operation
        return last is None or (last.is_done and last.error is None and self._consumed.reach(self._round))

    def wait_for_readers(self) -> None:
        """Wait until every rank has read the last message."""
        self.finish()  # this rank is one of the readers
        if self._ticket is not None and not self._consumed.reach(self._round):
            self._engine.wait(self._engine.start(iter(((self._consumed, self._round),))), self._ticket)

    def factor(self, share: float) -> float:
        """Divide by the number of ranks when copying in: with equal weights the sum is already the mean."""
        return share / len(self._bodies)

    def contribute(self, pieces: Sequence[Piece]) -> None:
        """Use tensors for the own part of the body, which is only read by this rank: it need not be written."""
        self._pieces = pieces

    def start(self, share: float, weight: float, absent: Sequence[int]) -> None:
        """Publish the body, and advance as far as possible without waiting."""
        self._ticket = self._engine.detector.ticket(self._what, self._exchange_id, sent_bytes=self.body.nbytes)
        header = self._headers[self._rank]
        HEADER.pack_into(header, 0, share, weight, len(absent))
        if self._all_flags:
            header[HEADER.size :] = self._all_flags
            for flag in absent:
                header[HEADER.size + flag] = 0
        self._round += 1
        self._published.post(self._round)
        self._operation = self._engine.start(self._steps(self._round))

    def finish(self) -> None:
        """Wait for the mean."""
        if self._operation is not None and self._ticket is not None:
            self._engine.wait(self._operation, self._ticket)

    def total(self) -> float:
        """Return the sum of the weights."""
        return self._total

    def is_flag_set(self, flag: int) -> bool:
        """Return whether any rank has set a flag."""
        return bool(self._flags[flag])

    def _steps(self, round_: int) -> Generator[Awaited]:
        yield self._published, round_
        shares, weights, absent = zip(*map(HEADER.unpack_from, self._headers), strict=True)
        self._total = total = sum(weights)
        scale = len(shares) / total if total > 0 else 0.0
        factors = [scale] * len(shares) if all(shares) else [scale if share else 0.0 for share in shares]
        self._flags = self._flags_of_host() if any(absent) else self._all_flags
        if not self._num_slices:
            weighted_sum_into(self.result, self._bodies, factors)
        else:
            if self._own_slices:
                self._sum_own(factors)
            self._reduced.post(round_)
            yield self._reduced, round_
            self._copy_result()
        self._consumed.post(round_)

    def _sum_own(self, factors: Sequence[float]) -> None:
        pieces, self._pieces = self._pieces, ()
        if not pieces or not factors[self._rank]:
            weighted_sum_into(self._own_sums, self._own_slices, factors)
            return
        others = [part for other, part in enumerate(self._own_slices) if other != self._rank and factors[other]]
        low = self.own.start
        for start, tensor, factor in pieces:
            where = slice(start - low, start - low + len(tensor))
            if others:
                add_own(self._own_sums[where], [part[where] for part in others], tensor, factor)
            else:
                torch.mul(tensor, factor, out=self._own_sums[where])
        # Those that are not left out are the same.
        if factors[self._rank] != 1.0:
            self._own_sums.mul_(factors[self._rank])

    def _copy_result(self) -> None:
        view = self._view
        if view is not None:
            if not view.written_pages().size:
                return
            view.forget()
            self._view = None
            self.result = torch.empty_like(self._sums)
        self.result.copy_(self._sums)

    def _flags_of_host(self) -> bytes:
        flags = 0
        for header in self._headers:
            flags |= int.from_bytes(header[HEADER.size :], "little")
        return flags.to_bytes(len(self._all_flags), "little")


class TwoLevelChannel(SharedChannel):
    """A channel for one bucket through the memory of each host, and between hosts."""

    def __init__(
        self,
        layout: ChannelLayout,
        mapping: Mapping,
        rank: int,
        engine: Engine,
        *,
        what: str,
        exchange_id: int,
        cross_host: CrossHostGroup,
        world_size: int,
    ) -> None:
        super().__init__(layout, mapping, rank, engine, what=what, exchange_id=exchange_id)
        self._cross_host = cross_host
        self._world_size = world_size
        self._tail = mapping.tensor(layout.tail, [1 + layout.size.num_flags], torch.float64)
        self._turn = 0

    def factor(self, share: float) -> float:
        """Divide by the number of all ranks on the way in."""
        return share / self._world_size

    def start(self, share: float, weight: float, absent: Sequence[int]) -> None:
        """Publish the body, and advance as far as possible without waiting."""
        self._turn = self._cross_host.take_turn()
        super().start(share, weight, absent)

    def _steps(self, round_: int) -> Generator[Awaited]:
        yield self._published, round_
        shares, weights, _ = zip(*map(HEADER.unpack_from, self._headers), strict=True)
        if self._own_slices:
            # Every owner sends the weights: it divides its slice by their sum.
            tail = self._tail if self._rank == 0 else torch.empty_like(self._tail)
            self._sum_own([1.0 if share else 0.0 for share in shares])
            tail[0] = sum(weights)
            if self._all_flags:
                tail[1:] = torch.frombuffer(bytearray(self._flags_of_host()), dtype=torch.uint8)
            yield from self._cross_host.all_reduce_(self._turn, [self._own_sums, tail])
            total = tail[0].item()
            scale = self._world_size / total if total > 0 else 0.0
            if scale != 1.0:
                self._own_sums.mul_(scale)
        self._reduced.post(round_)
        yield self._reduced, round_
        self._total = self._tail[0].item()
        self._flags = (self._tail[1:] > 0).to(torch.uint8).numpy().tobytes()
        self._copy_result()
        self._consumed.post(round_)


# -- weighted sums -------------------------------------------------------------------------------------


def weighted_sum_into(out: torch.Tensor, parts: Sequence[torch.Tensor], factors: Sequence[float]) -> None:
    """Write sum_r factors[r] * parts[r] into ``out``. A part with factor 0 has no effect, not even a NaN.

    ``out`` is not one of the parts.
    """
    if 0.0 in factors:
        parts = [part for part, factor in zip(parts, factors, strict=True) if factor]
        factors = [factor for factor in factors if factor]
    if not parts:
        out.zero_()
        return
    if out.dtype not in HALF_PRECISION:
        _weighted_sum(out, parts, factors)
        return
    for piece in pieces_of(out, parts):
        wide = [part.float() for part in piece[1:]]
        _weighted_sum(wide[0], wide, factors)
        piece[0].copy_(wide[0])


def add_own(out: torch.Tensor, parts: Sequence[torch.Tensor], own: torch.Tensor, factor: float) -> None:
    """Write the sum of ``parts``, at least one, and ``factor * own`` into ``out``, in one pass for one part."""
    torch.add(parts[0], own, alpha=factor, out=out)
    for part in parts[1:]:
        out.add_(part)


def _weighted_sum(out: torch.Tensor, parts: Sequence[torch.Tensor], factors: Sequence[float]) -> None:
    first = factors[0]
    if factors.count(first) == len(factors):
        if len(parts) > 1:
            torch.add(parts[0], parts[1], out=out)
            for part in parts[2:]:
                out.add_(part)
            if first != 1.0:
                out.mul_(first)
        else:
            torch.mul(parts[0], first, out=out)
        return
    torch.mul(parts[0], first, out=out)
    for part, factor in zip(parts[1:], factors[1:], strict=True):
        out.add_(part, alpha=factor)
