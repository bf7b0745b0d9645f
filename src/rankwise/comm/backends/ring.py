# SPDX-License-Identifier: Apache-2.0
"""A stream of tensors from one rank of a host to another, through memory that both see, used as a ring.

The receiver knows the size of each tensor. A tensor lies in one piece, or in pieces as large as the memory: where one
does not fit before the end of the memory, both ranks skip to the start.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from rankwise.comm.backends.engine import Counters
from rankwise.comm.backends.mapping import LINE_BYTES, PAGE_BYTES, rounded_up
from rankwise.tensors.arrays import bytes_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from rankwise.comm.backends.engine import Awaited, HostMemory, Operation
    from rankwise.health.flight_recorder import Ticket


class _Ring:
    """One end. Counts bytes since the stream began."""

    def __init__(self, memory: HostMemory, start: int, capacity: int, *, peer: int, is_sender: bool) -> None:
        self._engine = memory.engine
        self._capacity = capacity
        self._counters = Counters(memory.mapping, start, 0 if is_sender else 1, 2)
        self._other = _Other(self._counters, peer)
        self._bytes = memory.mapping.tensor(start + _control_bytes(), [capacity], torch.uint8)
        self._position = 0
        self._waiting: deque[torch.Tensor] = deque()
        self._num_asked = self._num_moved = 0
        """How many pieces were to be sent or received, and how many have been."""

    def _ask(self, tensor: torch.Tensor) -> int:
        """Have a tensor moved, in pieces that fit; return the number of the last one."""
        pieces = bytes_of(tensor).split(self._capacity)
        self._num_asked += len(pieces)
        self._waiting.extend(pieces)
        return self._num_asked

    def _next_end(self) -> int:
        """Return where the tensor ends that is next to move."""
        size = rounded_up(len(self._waiting[0]), LINE_BYTES)
        left = self._capacity - self._position % self._capacity
        return self._position + size + (left if left < size else 0)

    def _piece(self, end: int) -> torch.Tensor:
        num_bytes = len(self._waiting[0])
        first = (end - rounded_up(num_bytes, LINE_BYTES)) % self._capacity
        return self._bytes[first : first + num_bytes]

    def _note_moved(self, end: int) -> None:
        self._position = end
        self._counters.post(end)
        self._waiting.popleft()
        self._num_moved += 1


class RingSender(_Ring):
    """The end that sends."""

    def __init__(self, memory: HostMemory, start: int, capacity: int, *, peer: int) -> None:
        super().__init__(memory, start, capacity, peer=peer, is_sender=True)
        self._operation: Operation | None = None
        """The latest, which is done when all is sent."""

    def send(self, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor; where there is no room yet, while this rank waits. It may not change."""
        self._operation = self._engine.start(self._send_until(self._ask(tensor)))

    def finish(self, ticket: Ticket) -> None:
        """Wait until all is sent."""
        if self._operation is not None:
            self._engine.wait(self._operation, ticket)

    def _send_until(self, number: int) -> Generator[Awaited]:
        while self._num_moved < number:
            # What is skipped is free once all before it is received.
            end = self._next_end()
            needed = min(end - self._capacity, self._position)
            if not self._other.reach(needed):
                # Another operation may send the same tensor meanwhile.
                yield self._other, needed
                continue
            self._piece(end).copy_(self._waiting[0])
            self._note_moved(end)


class RingReceiver(_Ring):
    """The end that receives."""

    def __init__(self, memory: HostMemory, start: int, capacity: int, *, peer: int) -> None:
        super().__init__(memory, start, capacity, peer=peer, is_sender=False)

    def receive(self, tensor: torch.Tensor) -> int:
        """Receive into a contiguous tensor; return a number to wait for."""
        return self._ask(tensor)

    def wait(self, number: int, ticket: Ticket) -> None:
        """Wait until a tensor is received, and those before it.

        Raises:
            PeerFailed, PeerMissing: the sender has failed, or does not send.
        """
        if self._num_moved < number:
            self._engine.wait(self._engine.start(self._receive_until(number)), ticket)

    def _receive_until(self, number: int) -> Generator[Awaited]:
        while self._num_moved < number:
            end = self._next_end()
            if not self._other.reach(end):
                yield self._other, end
                continue
            self._waiting[0].copy_(self._piece(end))
            self._note_moved(end)


class _Other:
    """The progress of the rank at the other end. See :class:`rankwise.comm.backends.engine.Progress`."""

    def __init__(self, counters: Counters, rank: int) -> None:
        self._rank = rank
        self.reach, self.sleep_until = counters.reach, counters.sleep_until

    def last(self, value: int) -> int | None:
        """Return the rank at the other end, unless it has reached ``value``."""
        return None if self.reach(value) else self._rank


def ring_bytes(capacity: int) -> int:
    """Return how much memory a ring takes, of ``capacity`` bytes, a multiple of the page size."""
    return _control_bytes() + capacity


def _control_bytes() -> int:
    return rounded_up(Counters.num_bytes(2), PAGE_BYTES)
