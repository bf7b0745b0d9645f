# SPDX-License-Identifier: Apache-2.0
"""Tensors travel through memory that the ranks of a host share, and through Gloo between hosts.

What it cannot carry (tensors of a GPU, dtypes it cannot add up) goes through torch's group of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError, fold_values
from rankwise.exchange.across import Across
from rankwise.exchange.agreeing import WHAT_EACH_CALLED, calls_differ
from rankwise.exchange.bytes_of import bytes_of
from rankwise.exchange.handshake import open_together
from rankwise.exchange.mapping import PAGE_BYTES, rounded_up
from rankwise.exchange.protocol import words_of_lanes
from rankwise.exchange.reducing import can_reduce
from rankwise.exchange.results import Results
from rankwise.exchange.shared_lane import Layout, SharedLane, lay_out
from rankwise.exchange.staging import CallsDiffer, Staging
from rankwise.exchange.two_level_lane import TwoLevelLane
from rankwise.log import warn

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import torch

    from rankwise.exchange.agreeing import Gathers
    from rankwise.exchange.engine import Awaited, Engine, Operation
    from rankwise.exchange.mapping import Mapping
    from rankwise.exchange.protocol import Exchange, Lane, LaneSize
    from rankwise.exchange.torch_group import TorchGroup

SLOT_BYTES = 2**20
TWIN_SLOT_BYTES = 2**16
LANE_BYTES = 2**22
FLAT_BYTES = 2**16
"""Up to this size ranks of several hosts all talk to each other: two levels would take longer."""


@dataclass(frozen=True)
class Place:
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


class SharedMemory:
    """The exchange of ranks that share memory with others. See :class:`rankwise.exchange.protocol.Exchange`.

    Args:
        place: where this rank is.
        torch_group: of the whole world.
        engine: of this rank.
        staging: in memory of this host.
        across: to the other hosts, where there are any.
        channel: see :class:`rankwise.record.Ticket`.
    """

    def __init__(
        self,
        place: Place,
        torch_group: TorchGroup,
        engine: Engine,
        staging: Staging,
        across: Across | None,
        *,
        channel: int,
    ) -> None:
        self.rank = torch_group.rank
        self.world_size = torch_group.world_size
        self.watch = torch_group.watch
        self._place = place
        self._torch_group = torch_group
        self._engine = engine
        self._staging = staging
        self._across = across
        self._channel = channel
        self._agreed = ""
        self._results = Results()
        self._latest: Operation | None = None

    def agree(self, what: str) -> None:
        """Have the next collective checked against ``what``: on one host, when it meets the others."""
        if self._across is not None:
            self._torch_group.agree(what)
        else:
            self._agreed = what

    def meet(self, what: str) -> None:
        """Return when every rank has come to ``what``."""
        if self._across is not None:
            self._torch_group.meet(what)
        else:
            words = self._words(what)
            self._run(self._staging.meet(words), words, None)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, what: str) -> torch.Tensor:
        """Return the reduction over all ranks, within each host in rank order."""
        if tensor.device.type != "cpu" or not can_reduce(tensor.dtype, op):
            self.meet(what)
            return self._torch_group.all_reduce(tensor, op, what=what)
        if self._across is not None and tensor.nbytes <= FLAT_BYTES:
            return self._torch_group.all_reduce(tensor, op, what=what)
        out = self._results.empty(tuple(tensor.shape), tensor)
        words = self._words(what)
        self._run(self._staging.all_reduce(tensor.view(-1), out.view(-1), op, words, self._across), words, tensor)
        return out

    def all_gather(self, tensor: torch.Tensor, *, what: str) -> torch.Tensor:
        """Return [world_size, *tensor.shape], in rank order."""
        if tensor.device.type != "cpu" or self._across is not None:
            return self._torch_group.all_gather(tensor, what=what)
        out = self._results.empty((self.world_size, *tensor.shape), tensor)
        rows = bytes_of(out).view(self.world_size, -1)
        words = self._words(what)
        self._run(self._staging.all_gather(bytes_of(tensor), rows, words), words, tensor)
        return out

    def broadcast(self, tensor: torch.Tensor, source: int, *, what: str) -> torch.Tensor:
        """Return the tensor of rank ``source``."""
        if tensor.device.type != "cpu" or self._across is not None:
            return self._torch_group.broadcast(tensor, source, what=what)
        out = self._results.empty(tuple(tensor.shape), tensor)
        words = self._words(what)
        self._run(self._staging.broadcast(bytes_of(tensor), bytes_of(out), source, words), words, tensor)
        return out

    def all_to_all(self, tensor: torch.Tensor, sizes: Sequence[Sequence[int]], *, what: str) -> torch.Tensor:
        """Return what every rank has for this one, in rank order."""
        if tensor.device.type != "cpu" or self._across is not None:
            return self._torch_group.all_to_all(tensor, sizes, what=what)
        out = self._results.empty((sum(row[self.rank] for row in sizes),), tensor)
        words = self._words(what)
        self._run(self._staging.all_to_all(tensor, out, sizes, words), words, None)
        return out

    def twin(self) -> SharedMemory:
        """Return another exchange of the same ranks."""
        torch_group = self._torch_group if self._across is None else self._torch_group.twin()
        channel = self.watch.record.open_channel(torch_group.world_ranks)
        return open_shared_memory(
            self, self._place, torch_group, self._engine, slot_bytes=TWIN_SLOT_BYTES, channel=channel
        )

    def among(self, groups: Sequence[Sequence[int]]) -> Exchange:
        """Return an exchange of some of the ranks: in shared memory where every group is within a host."""
        torch_group = self._torch_group.among(groups)
        own = next(ranks for ranks in groups if self.rank in ranks)
        if any(not any(set(ranks) <= set(host) for host in self._place.hosts) for ranks in groups):
            return torch_group
        engine = self._engine.among([self._place.ranks.index(rank) for rank in own])
        place = Place([list(range(len(own)))], own.index(self.rank))
        return open_shared_memory(
            torch_group, place, torch_group, engine, slot_bytes=TWIN_SLOT_BYTES, channel=torch_group.channel
        )

    def lane_bytes(self, device: torch.device) -> int:
        """Return a size of which a core's cache holds a few."""
        return LANE_BYTES if device.type == "cpu" else self._torch_group.lane_bytes(device)

    def lanes(self, sizes: Sequence[LaneSize], what: str = "gradients") -> list[Lane]:
        """Return a lane for each size; through torch's group for a GPU, or where memory is short."""
        names = words_of_lanes(sizes, what)
        self.meet("; ".join(names))
        if any(size.device.type != "cpu" for size in sizes):
            return self._torch_group.twin().lanes(sizes, what)
        place, across = self._place, self._across
        num_slices = None if across is None else across.num_slices
        layouts = [Layout(size, len(place.ranks), num_slices) for size in sizes]
        arenas, arena_bytes = lay_out(layouts, PAGE_BYTES)
        end = arenas + len(place.ranks) * arena_bytes
        own_part = (arenas + place.local_rank * arena_bytes, arena_bytes)
        mapping, reasons = open_together(self, rounded_up(end, PAGE_BYTES), [own_part], first=place.ranks[0])
        if mapping is None:
            warn(f"gradients go through Gloo: no shared memory of {end / 2**20:.0f} MiB\n{fold_values(reasons)}")
            return self._torch_group.twin().lanes(sizes, what)
        lanes = [self._lane(layout, mapping, name) for layout, name in zip(layouts, names, strict=True)]
        for layout, lane in zip(layouts, lanes, strict=True):
            lane.follow([other for laid, other in zip(layouts, lanes, strict=True) if laid.overlaps(layout)])
        return list(lanes)

    def _lane(self, layout: Layout, mapping: Mapping, name: str) -> SharedLane:
        local_rank = self._place.local_rank
        if self._across is None:
            return SharedLane(layout, mapping, local_rank, self._engine, what=name, channel=self._channel)
        return TwoLevelLane(
            layout,
            mapping,
            local_rank,
            self._engine,
            what=name,
            channel=self._channel,
            across=self._across,
            world_size=self.world_size,
        )

    def close(self) -> None:
        """Let go of the other ranks' processes."""
        self._engine.peers.close()

    def _words(self, what: str) -> str:
        """Return what the collective that starts is to be on every rank."""
        agreed, self._agreed = self._agreed, ""
        return agreed or what

    def _run(self, steps: Generator[Awaited], words: str, tensor: torch.Tensor | None) -> None:
        ticket = self.watch.ticket(words, self._channel, tensor)
        if self._latest is not None:
            # An interrupt may have left it under way. The slots are free when it is done.
            self._engine.wait(self._latest, ticket)
        try:
            self._latest = self._engine.start(steps)
            self._engine.wait(self._latest, ticket)
        except CallsDiffer:
            self._latest = None
            ranks = [self._torch_group.world_ranks[rank] for rank in self._place.ranks]
            raise calls_differ(self._tell, words, self.watch.hostname, ranks, self.watch.world_size) from None

    def _tell(self, tensor: torch.Tensor) -> torch.Tensor:
        out = tensor.new_empty((len(self._place.ranks), *tensor.shape))
        rows = bytes_of(out).view(len(out), -1)
        self._run(self._staging.all_gather(bytes_of(tensor), rows, WHAT_EACH_CALLED), WHAT_EACH_CALLED, tensor)
        return out


def open_shared_memory(
    gathers: Gathers,
    place: Place,
    torch_group: TorchGroup,
    engine: Engine,
    *,
    slot_bytes: int = SLOT_BYTES,
    channel: int = 0,
) -> SharedMemory:
    """Open an exchange of its own for all ranks of ``torch_group``.

    Called by: every rank.

    Raises:
        ConfigurationError: some rank cannot share memory; with the reasons of all.
    """
    num_ranks = len(place.ranks)
    own_part = Staging.own_part(PAGE_BYTES, slot_bytes, place.local_rank, num_ranks)
    mapping = _open(gathers, place, PAGE_BYTES + Staging.num_bytes(slot_bytes, num_ranks), [own_part])
    staging = Staging(mapping, PAGE_BYTES, slot_bytes, place.local_rank, num_ranks)
    across = Across.open(place.hosts, place.rank) if len(place.hosts) > 1 else None
    return SharedMemory(place, torch_group, engine, staging, across, channel=channel)


def _open(gathers: Gathers, place: Place, num_bytes: int, own_parts: Sequence[tuple[int, int]]) -> Mapping:
    mapping, reasons = open_together(gathers, rounded_up(num_bytes, PAGE_BYTES), own_parts, first=place.ranks[0])
    if mapping is None:
        raise ConfigurationError(
            f"There is no shared memory of {num_bytes / 2**20:.0f} MiB for {len(place.ranks)} ranks.",
            evidence=fold_values(reasons),
            do='give the machine or container more memory, or rankwise.join(exchange="gloo")',
        )
    return mapping
