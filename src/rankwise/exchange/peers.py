# SPDX-License-Identifier: Apache-2.0
"""The processes of this host's ranks, and whether they are still there."""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Peers:
    """Holds on to each process, so that its number cannot come to mean another one. Ranks are those of the host."""

    def __init__(self, world_ranks: Sequence[int], processes: Sequence[int]) -> None:
        self._world_ranks = list(world_ranks)
        self._processes = list(processes)
        self._handles: list[int | None] = []
        for process in processes:
            try:
                self._handles.append(os.pidfd_open(process))
            except OSError:  # it has ended already
                self._handles.append(None)

    def among(self, ranks: Sequence[int]) -> Peers:
        """Return some of them, to be closed on their own."""
        return Peers([self._world_ranks[rank] for rank in ranks], [self._processes[rank] for rank in ranks])

    def __len__(self) -> int:
        return len(self._processes)

    def world_rank(self, rank: int) -> int:
        """Return the number in the world of a rank of this host."""
        return self._world_ranks[rank]

    def process(self, rank: int) -> int:
        """Return the process number of a rank of this host."""
        return self._processes[rank]

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of ``rank`` has ended."""
        if not self._handles:
            return False
        handle = self._handles[rank]
        if handle is None:
            return True
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Let go of the processes."""
        for handle in self._handles:
            if handle is not None:
                os.close(handle)
        self._handles.clear()
