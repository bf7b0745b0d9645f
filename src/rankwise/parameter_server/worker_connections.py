# SPDX-License-Identifier: Apache-2.0
"""The connections of a server to its workers: messages received, and answers sent. Decides nothing.

Runs on the thread of an authenticated server; the main thread takes the messages from a queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.parameter_server.messages import (
    PURPOSE,
    ServerMessage,
    TensorBuffer,
    open_memory,
    packed,
    receive_buffers,
)
from rankwise.store.server import AuthenticatedServer
from rankwise.store.wire import fill_on_loop, json_frame, receive_frame_on_loop

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rankwise.parameter_server.messages import Head, TensorRows


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message from a worker; ``None`` if the worker has left or was lost."""

    worker: int
    message: ServerMessage | None
    reason: str = ""
    """Why it was lost; empty if it left."""


class WorkerConnections:
    """Serves workers, from the first connection to ``close``.

    Args:
        listener: a listening socket.
        secret: of the job.
        workers: their ranks.
        parameters: that this server keeps.
    """

    def __init__(
        self, listener: socket.socket, secret: bytes, workers: Sequence[int], parameters: Sequence[torch.Tensor]
    ) -> None:
        self.changed = threading.Condition()
        """Notified whenever a message has arrived."""
        self.arrivals: deque[ReceivedMessage] = deque()
        self.connected: set[int] = set()
        self.bodies = {worker: TensorBuffer(parameters) for worker in workers}
        """Tensors from each worker, which sends no more before it has an answer."""
        self._unanswered: set[int] = set()
        """Workers that wait for an answer. At most one message of each is here, so memory does not grow."""
        self._parameters = parameters
        self._sharing: set[int] = set()
        """Workers of this host whose outgoing memory this server has mapped, and that have mapped its own."""
        self._sockets: dict[int, socket.socket] = {}
        self._server = AuthenticatedServer(listener, secret, {}, {PURPOSE: self._serve})
        self._server.start()
        self.port = self._server.port

    def answer(
        self, worker: int, head: Head, body: TensorBuffer, positions: Sequence[int], rows: Sequence[TensorRows]
    ) -> None:
        """Send an answer to a connected worker, without waiting until it is sent."""
        sock = self._sockets.get(worker)
        if sock is not None:
            self._unanswered.discard(worker)
            message = packed(head, body, positions, rows, is_shared=worker in self._sharing)
            asyncio.run_coroutine_threadsafe(_send(sock, message), self._server.loop)

    def drop(self, worker: int) -> None:
        """End the connection of a worker that is known to have exited."""
        sock = self._sockets.get(worker)
        if sock is not None:
            self._server.loop.call_soon_threadsafe(_shut, sock)

    def close(self) -> None:
        """End every connection."""
        self._server.close()

    # -- on the thread -----------------------------------------------------------------------------

    async def _serve(self, sock: socket.socket) -> None:
        greeting: Head = json.loads(await receive_frame_on_loop(sock))
        worker = int(greeting["worker"])
        is_shared = self._share(worker, greeting["memory"])
        await _send(sock, [json_frame({"is_shared": is_shared})])
        body = self.bodies[worker]
        self._sockets[worker] = sock
        with self.changed:
            self.connected.add(worker)
            self.changed.notify_all()
        reason = "its connection was closed"
        try:
            while True:
                head: Head = json.loads(await receive_frame_on_loop(sock))
                if head["kind"] == "leave":
                    reason = ""
                    return
                if worker in self._unanswered:
                    raise ConnectionError("it sent a message before its last one was answered")
                self._unanswered.add(worker)
                pieces, rows = receive_buffers(head, body, is_shared=is_shared)
                for piece in pieces:
                    await fill_on_loop(sock, piece)
                self._put(ReceivedMessage(worker, ServerMessage(head, rows)))
        except OSError as error:
            reason = str(error) or reason
            raise
        finally:
            del self._sockets[worker]
            self._put(ReceivedMessage(worker, None, reason))

    def _share(self, worker: int, ticket: str) -> bool:
        """Map a worker's outgoing memory, and return whether that worked."""
        mapping = open_memory(ticket, self._parameters)
        if mapping is None:
            return False
        mapping.settle()
        self.bodies[worker] = TensorBuffer(self._parameters, mapping)
        self._sharing.add(worker)
        return True

    def _put(self, arrival: ReceivedMessage) -> None:
        with self.changed:
            self.arrivals.append(arrival)
            self.changed.notify_all()


async def _send(sock: socket.socket, pieces: Sequence[bytes | memoryview]) -> None:
    loop = asyncio.get_running_loop()
    for piece in pieces:
        await loop.sock_sendall(sock, piece)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # It is closed already.
        sock.shutdown(socket.SHUT_RDWR)
