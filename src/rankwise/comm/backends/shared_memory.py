# SPDX-License-Identifier: Apache-2.0
"""Send tensors through memory that the ranks of a host share, and through Gloo between hosts.

What it does not support (GPU tensors, dtypes it cannot sum) goes through torch's group of all ranks.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rankwise.comm.backends.engine import HostMemory
from rankwise.comm.backends.mapping import PAGE_BYTES, open_together, rounded_up
from rankwise.comm.backends.protocol import NOTE_BYTES, WHAT_EACH_CALLED, calls_differ, describe_channels
from rankwise.comm.backends.shared_channel import ChannelLayout, SharedChannel, TwoLevelChannel, lay_out
from rankwise.comm.backends.staging import REDUCIBLE, CallsDiffer, CrossHostGroup, Staging
from rankwise.errors import ConfigurationError, fold_values
from rankwise.log import warn
from rankwise.tensors.arrays import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rankwise.comm.backends.engine import Awaited, Engine, Operation
    from rankwise.comm.backends.protocol import BucketChannel, ChannelSize, Exchange
    from rankwise.comm.backends.torch_group import TorchGroup
    from rankwise.health.flight_recorder import Ticket

SLOT_BYTES = 2**20
DUP_SLOT_BYTES = 2**16
CHANNEL_BYTES = 2**22
"""Of which a core's cache fits a few: the others travel between hosts meanwhile."""
HOST_CHANNEL_BYTES = 2**25
"""On one host nothing moves while backward runs: fewer channels have fewer waits, and two fit an arena."""
FLAT_BYTES = 2**16
"""Up to this size ranks of several hosts all exchange directly: two levels would take longer."""
LARGE_BYTES = 2**20
KEPT_BYTES = 2**28
"""How much may be idle."""
MOST_KEPT = 2
"""A loop that replaces its tensor by the result holds one while it creates the next."""


@dataclass(frozen=True)
class HostMap:
    """Where a rank is: the ranks of each host, and which of them this one is."""

    hosts: list[list[int]]
    rank: int

    @property
    def ranks(self) -> list[int]:
        """The ranks of this host."""
        return next(ranks for ranks in self.hosts if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        """The number of this rank on its host."""
        return self.ranks.index(self.rank)


class ResultMemory:
    """Makes the tensors of results, in the memory of earlier large ones that nothing refers to.

    The kernel provides new memory at a fraction of the speed at which tensors are summed: for a result of 100 MB, new
    memory would cost more than the collective itself.
    """

    def __init__(self) -> None:
        self._kept: list[bytearray] = []

    def empty(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor of this shape and of the dtype of ``like``, which is on the CPU."""
        num_bytes = like.element_size() * math.prod(shape)
        if num_bytes < LARGE_BYTES:
            return like.new_empty(shape)
        return torch.frombuffer(self._memory(num_bytes), dtype=like.dtype).view(shape)

    def _memory(self, num_bytes: int) -> bytearray:
        for position in range(len(self._kept)):
            # Two references: the list's, and that of the call. A tensor on it would be a third.
            if len(self._kept[position]) == num_bytes and sys.getrefcount(self._kept[position]) == 2:  # noqa: PLR2004
                self._kept.append(self._kept.pop(position))
                return self._kept[-1]
        memory = bytearray(num_bytes)
        if num_bytes * MOST_KEPT <= KEPT_BYTES:
            self._kept = [*self._kept[1 - MOST_KEPT :], memory]
        return memory


class SharedMemory:
    """The exchange of ranks that share memory with others. See :class:`rankwise.comm.backends.protocol.Exchange`.

    ``staging`` is in memory of this host; ``cross_host`` reaches the other hosts, where there are any.
    """

    def __init__(
        self,
        host_map: HostMap,
        torch_group: TorchGroup,
        engine: Engine,
        staging: Staging,
        cross_host: CrossHostGroup | None,
        *,
        exchange_id: int,
    ) -> None:
        self.rank = torch_group.rank
        self.world_size = torch_group.world_size
        self.detector = torch_group.detector
        self._host_map = host_map
        self._torch_group = torch_group
        self._engine = engine
        self._staging = staging
        self._cross_host = cross_host
        self._exchange_id = exchange_id
        self._agreed = ""
        self._results = ResultMemory()
        self._latest: tuple[Operation, Ticket] | None = None

    def agree(self, what: str) -> None:
        """Check the next collective against ``what``: on one host, when it reaches the others."""
        if self._cross_host is not None:
            self._torch_group.agree(what)
        else:
            self._agreed = what

    def gather_notes(self, note: bytes, what: str) -> list[bytes]:
        """Return the notes of all ranks, once they have agreed on ``what``."""
        if self._cross_host is not None:
            return self._torch_group.gather_notes(note, what)
        found: list[bytes] = []
        self._run(what, None, self._staging.gather_notes, note.ljust(NOTE_BYTES, b"\0"), found)
        return found

    def barrier(self, what: str) -> None:
        """Return when every rank has reached ``what``."""
        if self._cross_host is not None:
            self._torch_group.barrier(what)
        else:
            self._run(what, None, self._staging.barrier)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, what: str) -> torch.Tensor:
        """Return the reduction over all ranks, within each host in rank order."""
        if tensor.device.type != "cpu" or tensor.dtype not in REDUCIBLE[op]:
            self.barrier(what)
            return self._torch_group.all_reduce(tensor, op, what=what)
        if self._cross_host is not None and tensor.nbytes <= FLAT_BYTES:
            return self._torch_group.all_reduce(tensor, op, what=what)
        out = self._results.empty(tuple(tensor.shape), tensor)
        self._run(what, tensor, self._staging.all_reduce, tensor.view(-1), out.view(-1), op, self._cross_host)
        return out

    def all_gather(self, tensor: torch.Tensor, *, what: str) -> torch.Tensor:
        """Return [world_size, *tensor.shape], in rank order."""
        if tensor.device.type != "cpu" or self._cross_host is not None:
            return self._torch_group.all_gather(tensor, what=what)
        out = self._results.empty((self.world_size, *tensor.shape), tensor)
        rows = bytes_of(out).view(self.world_size, -1)
        self._run(what, tensor, self._staging.all_gather, bytes_of(tensor), rows)
        return out

    def broadcast(self, tensor: torch.Tensor, source: int, *, what: str) -> torch.Tensor:
        """Return the tensor of rank ``source``."""
        if tensor.device.type != "cpu" or self._cross_host is not None:
            return self._torch_group.broadcast(tensor, source, what=what)
        out = self._results.empty(tuple(tensor.shape), tensor)
        self._run(what, tensor, self._staging.broadcast, bytes_of(tensor), bytes_of(out), source)
        return out

    def all_to_all(self, tensor: torch.Tensor, sizes: Sequence[Sequence[int]], *, what: str) -> torch.Tensor:
        """Return what every rank sends to this one, in rank order."""
        if tensor.device.type != "cpu" or self._cross_host is not None:
            return self._torch_group.all_to_all(tensor, sizes, what=what)
        out = self._results.empty((sum(row[self.rank] for row in sizes),), tensor)
        self._run(what, None, self._staging.all_to_all, tensor, out, sizes)
        return out

    def dup(self) -> SharedMemory:
        """Return another exchange of the same ranks."""
        torch_group = self._torch_group if self._cross_host is None else self._torch_group.dup()
        exchange_id = self.detector.recorder.new_exchange_id(torch_group.world_ranks)
        return open_shared_memory(
            self, self._host_map, torch_group, self._engine, slot_bytes=DUP_SLOT_BYTES, exchange_id=exchange_id
        )

    def split(self, groups: Sequence[Sequence[int]]) -> Exchange:
        """Return an exchange of some of the ranks: in shared memory if every group is within a host."""
        torch_group = self._torch_group.split(groups)
        own = next(ranks for ranks in groups if self.rank in ranks)
        if any(not any(set(ranks) <= set(host) for host in self._host_map.hosts) for ranks in groups):
            return torch_group
        engine = self._engine.subset([self._host_map.ranks.index(rank) for rank in own])
        host_map = HostMap([list(range(len(own)))], own.index(self.rank))
        return open_shared_memory(
            torch_group, host_map, torch_group, engine, slot_bytes=DUP_SLOT_BYTES, exchange_id=torch_group.exchange_id
        )

    def channel_bytes(self, device: torch.device) -> int:
        """Return how large a channel should be."""
        if device.type != "cpu":
            return self._torch_group.channel_bytes(device)
        return HOST_CHANNEL_BYTES if self._cross_host is None else CHANNEL_BYTES

    def channels(self, sizes: Sequence[ChannelSize], what: str = "gradients") -> list[BucketChannel]:
        """Return a channel for each size; through torch's group for a GPU, or if memory is short."""
        names = describe_channels(sizes, what)
        self.barrier("; ".join(names))
        if any(size.device.type != "cpu" for size in sizes):
            return self._torch_group.dup().channels(sizes, what)
        host_map, cross_host = self._host_map, self._cross_host
        num_slices = None if cross_host is None else cross_host.num_slices
        layouts = [ChannelLayout(size, len(host_map.ranks), num_slices) for size in sizes]
        arenas, arena_bytes = lay_out(layouts, PAGE_BYTES)
        end = arenas + len(host_map.ranks) * arena_bytes
        own_parts = [(arenas + host_map.local_rank * arena_bytes, arena_bytes)]
        own_parts += [layout.own_sums(host_map.local_rank) for layout in layouts]
        mapping, reasons = open_together(self, rounded_up(end, PAGE_BYTES), own_parts, first=host_map.ranks[0])
        if mapping is None:
            warn(f"gradients go through Gloo: no shared memory of {end / 2**20:.0f} MiB\n{fold_values(reasons)}")
            return self._torch_group.dup().channels(sizes, what)
        channels = [
            SharedChannel(layout, mapping, host_map.local_rank, self._engine, what=name, exchange_id=self._exchange_id)
            if cross_host is None
            else TwoLevelChannel(
                layout,
                mapping,
                host_map.local_rank,
                self._engine,
                what=name,
                exchange_id=self._exchange_id,
                cross_host=cross_host,
                world_size=self.world_size,
            )
            for layout, name in zip(layouts, names, strict=True)
        ]
        for layout, channel in zip(layouts, channels, strict=True):
            channel.follow([other for laid, other in zip(layouts, channels, strict=True) if laid.overlaps(layout)])
        return list(channels)

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host, by their numbers in this exchange."""
        return self._host_map.hosts

    def host_memory(
        self, num_bytes: int, own_parts: Sequence[tuple[int, int]]
    ) -> tuple[HostMemory | None, dict[int, str]]:
        """Open memory for the ranks of each host, all zero but for its first page.

        Called by: every rank, with the same ``num_bytes`` on the ranks of one host.

        Args:
            num_bytes: all of it; the first page is not for the caller.
            own_parts: starts and lengths of the parts that mostly this rank writes.

        Returns:
            The memory, or ``None`` on every rank, with the reasons of those that could not open it.
        """
        host_map = self._host_map
        mapping, reasons = open_together(self, rounded_up(num_bytes, PAGE_BYTES), own_parts, first=host_map.ranks[0])
        if mapping is None:
            return None, reasons
        ranks = [self._torch_group.world_ranks[rank] for rank in host_map.ranks]
        return HostMemory(mapping, self._engine, host_map.local_rank, ranks, self._exchange_id), {}

    def close(self) -> None:
        """Release the handles of the other ranks' processes."""
        self._engine.peers.close()

    def _run(
        self, what: str, tensor: torch.Tensor | None, steps: Callable[..., Generator[Awaited]], *args: object
    ) -> None:
        """Run a collective of the staging memory: ``steps(call, *args)``, with the call that the ranks agree on."""
        words, self._agreed = self._agreed or what, ""
        ticket = self.detector.ticket(words, self._exchange_id, tensor)
        if self._latest is not None and not self._latest[0].is_done:
            # An interrupt has left it pending. The slots are free when it is done.
            self._engine.wait(*self._latest)
        try:
            self._latest = (self._engine.start(steps(words, *args)), ticket)
            self._engine.wait(*self._latest)
        except CallsDiffer:
            self._latest = None
            ranks = [self._torch_group.world_ranks[rank] for rank in self._host_map.ranks]
            raise calls_differ(
                self._gather_calls, words, self.detector.hostname, ranks, self.detector.world_size
            ) from None

    def _gather_calls(self, tensor: torch.Tensor) -> torch.Tensor:
        out = tensor.new_empty((len(self._host_map.ranks), *tensor.shape))
        rows = bytes_of(out).view(len(out), -1)
        self._run(WHAT_EACH_CALLED, tensor, self._staging.all_gather, bytes_of(tensor), rows)
        return out


def open_shared_memory(
    gathers: Exchange,
    host_map: HostMap,
    torch_group: TorchGroup,
    engine: Engine,
    *,
    slot_bytes: int = SLOT_BYTES,
    exchange_id: int = 0,
) -> SharedMemory:
    """Open a separate exchange for all ranks of ``torch_group``.

    Called by: every rank.

    Raises:
        ConfigurationError: some rank cannot share memory; with the reasons of all.
    """
    num_ranks = len(host_map.ranks)
    num_bytes = rounded_up(PAGE_BYTES + Staging.num_bytes(slot_bytes, num_ranks), PAGE_BYTES)
    own_part = Staging.own_part(PAGE_BYTES, slot_bytes, host_map.local_rank, num_ranks)
    mapping, reasons = open_together(gathers, num_bytes, [own_part], first=host_map.ranks[0])
    if mapping is None:
        raise ConfigurationError(
            f"Cannot get {num_bytes / 2**20:.0f} MiB of shared memory for {num_ranks} ranks.",
            evidence=fold_values(reasons),
            do='give the machine or container more memory, or rankwise.join(exchange="gloo")',
        )
    staging = Staging(mapping, PAGE_BYTES, slot_bytes, host_map.local_rank, num_ranks)
    cross_host = CrossHostGroup.open(host_map.hosts, host_map.rank) if len(host_map.hosts) > 1 else None
    return SharedMemory(host_map, torch_group, engine, staging, cross_host, exchange_id=exchange_id)
