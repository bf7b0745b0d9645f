# SPDX-License-Identifier: Apache-2.0
"""A worker's connection to one server: a thread that sends what the main thread hands it and takes the answer.

Every message is answered, and the next one is sent only then. Behind the unanswered one waits at most one step, since a
worker takes its answer before it takes another step; loops without steps are counted. So a server that is slow or
stopped makes a worker wait in its next step, and fills the memory of neither.
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
from rankwise.parallel.parameter_server.messages import (
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

    from rankwise.parallel.parameter_server.messages import Head, TensorRows


class ServerConnection:
    """The way to one server, from the first message to ``close``.

    Args:
        rank: of this worker.
        parameters: what the server keeps.
        changed: notified when an answer arrives, or the connection breaks.
        ticket: of the memory in which the server, on the same host, lays out the parameters; empty for none.
    """

    def __init__(
        self, rank: int, parameters: Sequence[torch.Tensor], changed: threading.Condition, ticket: str
    ) -> None:
        self.outgoing = TensorBuffer(parameters)
        """What goes to the server; to be written while no request is open."""
        self.incoming = TensorBuffer(parameters)
        """What has come from it; to be read while no request is open."""
        self.is_shared = False
        """Whether both are memory that the server sees too."""
        self._parameters = parameters
        self._ticket = ticket
        self.error: str | None = None
        """Why no request is possible any more."""
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
        """Begin to connect.

        Args:
            host: of the server.
            port: where it listens.
            secret: of the job.
            timeout_seconds: how long to try.
        """
        arguments = (host, port, secret, timeout_seconds)
        self._thread = threading.Thread(target=self._run, args=arguments, name="rankwise-to-server", daemon=True)
        self._thread.start()

    def request(self, head: Head, positions: Sequence[int], rows: Sequence[TensorRows]) -> None:
        """Send a message, and receive its answer.

        Args:
            head: of the message.
            positions: which tensors of ``outgoing`` go with it.
            rows: of others.
        """
        message = packed(head, self.outgoing, positions, rows, is_shared=self.is_shared)
        with self._changed:
            self._loops = None
            self._outbox.put(message)

    def end_loop(self, loader: int) -> None:
        """Notify the server that a loop without steps is over; nothing has to be waited for."""
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
        """Return the answer that is there; the whole tensors it tells of are in ``incoming``."""
        answer, self._answer = self._answer, None
        if answer is None:
            raise RuntimeError("no reply was received")
        return answer

    def leave(self) -> None:
        """Announce that no request follows, and close."""
        self._outbox.put(None)

    def has_left(self) -> bool:
        """Return whether the server has been told, or cannot be any more."""
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
