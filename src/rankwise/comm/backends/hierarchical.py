# SPDX-License-Identifier: Apache-2.0
"""Collectives of ranks on several hosts: within each host first, through its memory, then across hosts.

Each of the first ranks of a host owns one slice. It reduces the slice within its host, and then with the owners of the
same slice on the other hosts, over a torch group; every rank copies all slices.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rankwise.comm.backends.shared_channel import HEADER, SharedChannel
from rankwise.comm.backends.torch_group import REDUCE_OPS, handle_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rankwise.comm.backends.engine import Awaited, Engine
    from rankwise.comm.backends.mapping import Mapping
    from rankwise.comm.backends.shared_channel import ChannelLayout


MOMENT_SECONDS = 100e-6
"""torch's own wait with a timeout ends in an exception, which costs more."""


class _Elsewhere:
    """Waits for a condition that no rank of this host posts: there is no word of memory to sleep on."""

    def __init__(self, is_met: Callable[[], bool]) -> None:
        self._is_met = is_met

    def reach(self, value: int) -> bool:
        return self._is_met() >= value

    def sleep_until(self, _: int, seconds: float) -> None:
        """Sleep for a moment; all other pending operations are advanced afterwards."""
        time.sleep(min(seconds, MOMENT_SECONDS))

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
        yield _Elsewhere(lambda: self.num_sent >= turn), True
        try:
            works = [
                handle_of(dist.all_reduce(tensor, REDUCE_OPS[op], group=self._group, async_op=True))
                for tensor in tensors
            ]
        finally:
            self.num_sent += 1
        for work in works:
            yield _Elsewhere(work.is_completed), True
            work.wait()  # raises its error


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
        self._take_result()
        self._consumed.post(round_)
