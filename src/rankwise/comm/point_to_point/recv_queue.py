# SPDX-License-Identifier: Apache-2.0
"""Messages received from other ranks and not taken yet. Filled by the thread of this rank's server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rankwise.comm.point_to_point.message import sizes_of
from rankwise.store.wire import fill_on_loop, receive_frame_on_loop
from rankwise.tensors.as_bytes import memory_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable

LEFT = "it has left"


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message from another rank."""

    head: dict[str, Any]
    buffers: list[torch.Tensor]


class RecvQueue:
    """Received messages by rank: values in the order they were sent, gradients by the value they belong to."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Held for every access to the rest; notified whenever something was received, sent or closed."""
        self.values: defaultdict[int, deque[ReceivedMessage]] = defaultdict(deque)
        self.gradients: dict[tuple[int, int], deque[ReceivedMessage]] = {}
        """Gradients of the values whose ``backward()`` may still be called."""
        self.untaken: Counter[int] = Counter()
        """How many gradients a rank sent for values whose ``backward()`` never used them."""
        self.ended: dict[int, str] = {}
        """Why a rank sends nothing more."""

    def expect(self, rank: int, number: int) -> None:
        """Keep the gradients of a value that was sent to ``rank``."""
        with self.changed:
            self.gradients[rank, number] = deque()

    def forget(self, rank: int, number: int) -> None:
        """Discard gradients that can no longer be used."""
        # Garbage collection may call this in a thread that holds the lock: removing one key needs none.
        self._count(rank, self.gradients.pop((rank, number), ()))

    async def serve(self, sock: socket.socket) -> None:
        """Receive all messages of one rank until it closes, and confirm each with a byte."""
        source = int(json.loads(await receive_frame_on_loop(sock))["rank"])
        reason = "the connection ended"
        try:
            while True:
                head: dict[str, Any] = json.loads(await receive_frame_on_loop(sock))
                if head["kind"] == "end":
                    reason = LEFT
                    return
                message = ReceivedMessage(head, [await _buffer(sock, size) for size in sizes_of(head["tree"])])
                with self.changed:
                    self._put(source, message)
                    self.changed.notify_all()
                await asyncio.get_running_loop().sock_sendall(sock, b"\0")
        finally:
            with self.changed:
                self.ended[source] = reason
                self.changed.notify_all()

    def count_untaken(self) -> Counter[int]:
        """Return how many gradients from each rank are unused so far."""
        for (rank, number), waiting in list(self.gradients.items()):
            if waiting:
                self.forget(rank, number)
        return self.untaken

    def _count(self, rank: int, waiting: Iterable[ReceivedMessage]) -> None:
        self.untaken[rank] += sum(message.head["kind"] == "gradients" for message in waiting)

    def _put(self, source: int, message: ReceivedMessage) -> None:
        if message.head["kind"] == "value":
            self.values[source].append(message)
        else:
            waiting = self.gradients.get((source, int(message.head["number"])))
            if waiting is not None:
                waiting.append(message)
            else:
                self._count(source, [message])


async def _buffer(sock: socket.socket, size: int) -> torch.Tensor:
    """Return the next ``size`` bytes, read into the memory that the value will have."""
    buffer = torch.empty(size, dtype=torch.uint8)
    await fill_on_loop(sock, memory_of(buffer))
    return buffer
