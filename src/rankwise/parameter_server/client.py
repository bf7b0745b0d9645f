# SPDX-License-Identifier: Apache-2.0
"""A worker's connection to one server: a thread that sends the main thread's messages and receives the answers.

The next message is sent only after the last was answered. At most one step waits behind an unanswered one, since a
worker takes its answer before its next step; loops without steps are counted. So a slow or stopped server makes a
worker wait in its next step, and fills the memory of neither.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from collections import Counter
from typing import TYPE_CHECKING

from rankwise.errors import RankwiseError
from rankwise.parameter_server.messages import (
    PURPOSE,
    ServerMessage,
    TensorBuffer,
    create_memory,
    open_memory,
    packed,
    receive_buffers,
)
from rankwise.store.wire import fill, json_frame, open_connection, receive_frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rankwise.parameter_server.messages import Head, TensorRows


class ServerConnection:
    """The connection to one server, from the first message to ``close``.

    Args:
        rank: of this worker.
        parameters: that the server keeps.
        changed: notified when an answer arrives, or the connection breaks.
        ticket: of the memory into which a server on the same host writes the parameters; else empty.
    """

    def __init__(
        self, rank: int, parameters: Sequence[torch.Tensor], changed: threading.Condition, ticket: str
    ) -> None:
        self.outgoing = TensorBuffer(parameters)
        """Tensors for the server; written while no request is open."""
        self.incoming = TensorBuffer(parameters)
        """Tensors from the server; read while no request is open."""
        self.is_shared = False
        """Whether both are memory that the server has mapped too."""
        self._parameters = parameters
        self._ticket = ticket
        self.error: str | None = None
        """Why requests are no longer possible."""
        self._is_connected = False
        self._rank = rank
        self._changed = changed
        self._answer: ServerMessage | None = None
        self._outbox: queue.SimpleQueue[list[bytes | memoryview] | Counter[int] | None] = queue.SimpleQueue()
        self._loops: Counter[int] | None = None
        """Loops without steps, by loader: the last entry of the outbox, while it is there and more can be counted."""
        self._is_over = False
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def open(self, host: str, port: int, secret: bytes, timeout_seconds: float) -> None:
        """Begin to connect, with the secret of the job."""
        arguments = (host, port, secret, timeout_seconds)
        self._thread = threading.Thread(target=self._run, args=arguments, name="rankwise-to-server", daemon=True)
        self._thread.start()

    def request(self, head: Head, positions: Sequence[int], rows: Sequence[TensorRows]) -> None:
        """Send a message with tensors of ``outgoing`` by position and rows of others; then receive its answer."""
        message = packed(head, self.outgoing, positions, rows, is_shared=self.is_shared)
        with self._changed:
            self._loops = None
            self._outbox.put(message)

    def end_loop(self, loader: int) -> None:
        """Notify the server that a loop without steps is over, without waiting."""
        with self._changed:
            if self._loops is None:
                self._loops = Counter()
                self._outbox.put(self._loops)
            self._loops[loader] += 1

    def has_connected(self) -> bool:
        """Return whether the server accepts requests."""
        return self._is_connected

    def has_answer(self) -> bool:
        """Return whether the answer to the request has arrived."""
        return self._answer is not None

    def take(self) -> ServerMessage:
        """Return the answer that has arrived; its whole tensors are in ``incoming``."""
        answer, self._answer = self._answer, None
        if answer is None:
            raise RuntimeError("no reply was received")
        return answer

    def leave(self) -> None:
        """Announce that no request follows, and close."""
        self._outbox.put(None)

    def has_left(self) -> bool:
        """Return whether the server has been notified, or no longer can be."""
        return self._is_over

    def close(self) -> None:
        """Close at once."""
        self._outbox.put(None)
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):  # It is closed already.
                sock.shutdown(socket.SHUT_RDWR)

    # -- the thread --------------------------------------------------------------------------------

    def _run(self, host: str, port: int, secret: bytes, timeout_seconds: float) -> None:
        try:
            with open_connection(host, port, secret, PURPOSE, timeout_seconds) as sock:
                self._socket = sock
                self._talk(sock)
        except (OSError, RankwiseError) as error:
            self.error = str(error) or type(error).__name__
        finally:
            self._socket = None
            with self._changed:
                self.error = self.error or "the connection was closed"
                self._is_over = True
                self._changed.notify_all()

    def _talk(self, sock: socket.socket) -> None:
        self._greet(sock)
        with self._changed:
            self._is_connected = True
            self._changed.notify_all()
        while (message := self._outbox.get()) is not None:
            if isinstance(message, Counter):
                sock.sendall(self._loops_ended(message))
                receive_frame(sock)
                continue
            for piece in message:
                sock.sendall(piece)
            head = json.loads(receive_frame(sock))
            memory, rows = receive_buffers(head, self.incoming, is_shared=self.is_shared)
            for piece in memory:
                fill(sock, piece)
            with self._changed:
                self._answer = ServerMessage(head, rows)
                self._changed.notify_all()
        sock.sendall(json_frame({"kind": "leave"}))

    def _loops_ended(self, loops: Counter[int]) -> bytes:
        with self._changed:
            if self._loops is loops:
                self._loops = None
        return json_frame({"kind": "end_loops", "loops": [*loops.items()], "whole": [], "rows": []})

    def _greet(self, sock: socket.socket) -> None:
        """Send this worker's rank, and share memory with a server that can."""
        theirs = open_memory(self._ticket, self._parameters)
        own = None if theirs is None else create_memory(self._parameters)
        sock.sendall(json_frame({"worker": self._rank, "memory": "" if own is None else own.ticket}))
        self.is_shared = bool(json.loads(receive_frame(sock))["is_shared"])
        for mapping in (own, theirs):
            if mapping is not None:
                mapping.settle()
        if self.is_shared:
            self.outgoing, self.incoming = TensorBuffer(self._parameters, own), TensorBuffer(self._parameters, theirs)
