# SPDX-License-Identifier: Apache-2.0
"""One rank's peers on the other hosts: a group of torch's per slice, and waiting for it in the engine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from rankwise.exchange.torch_group import REDUCE_OPS

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import torch

    from rankwise.exchange.engine import Awaited

MOMENT_SECONDS = 100e-6
"""A wait of torch's own, with a limit, ends in an exception that costs more."""


class _Elsewhere:
    """Waits for what no rank of this host posts: there is no word of memory to sleep on."""

    def sleep(self, seconds: float) -> None:
        """Sleep for a moment; everything else that is under way is moved on after it."""
        time.sleep(min(seconds, MOMENT_SECONDS))

    def rank(self) -> int | None:
        """Return none."""
        return None


class _Sent(_Elsewhere):
    """Waits for a collective of torch's."""

    def __init__(self, work: dist.Work | None) -> None:
        if work is None:
            message = "torch's process group did not return a handle"
            raise RuntimeError(message)
        self._work = work

    def is_met(self) -> bool:
        """Return whether the result is there."""
        if not self._work.is_completed():
            return False
        self._work.wait()  # raises what broke it
        return True


class _Turn(_Elsewhere):
    """Waits until everything before it has been sent."""

    def __init__(self, across: Across, number: int) -> None:
        self._across = across
        self._number = number

    def is_met(self) -> bool:
        """Return whether it has."""
        return self._across.num_sent >= self._number


class Across:
    """The ranks that own one slice, one on each host. Sends in the order in which turns were taken."""

    def __init__(self, group: dist.ProcessGroup | None, num_slices: int) -> None:
        self.num_slices = num_slices
        self.num_sent = 0
        self._group = group
        self._num_turns = 0

    @classmethod
    def open(cls, hosts: Sequence[Sequence[int]], rank: int) -> Across:
        """Open the groups of all slices and return that of ``rank``.

        Called by: every rank of the world.

        Args:
            hosts: the ranks of each host.
            rank: this one.
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
        yield _Turn(self, turn)
        try:
            works = [dist.all_reduce(tensor, REDUCE_OPS[op], group=self._group, async_op=True) for tensor in tensors]
        finally:
            self.num_sent += 1
        for work in works:
            yield _Sent(work)
