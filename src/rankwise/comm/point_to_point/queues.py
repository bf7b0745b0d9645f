# SPDX-License-Identifier: Apache-2.0
"""The two ends of the connection from one rank to another.

A queue of messages and a thread that sends them, so that callers do not wait; and the received messages that were not
taken yet, filled by the thread of this rank's server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import socket
import threading
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rankwise.comm.point_to_point.message import sizes_of
from rankwise.errors import RankwiseError
from rankwise.store.wire import as_sent, fill_on_loop, json_frame, open_connection, receive_frame_on_loop
from rankwise.tensors.arrays import memory_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rankwise.store.values import Store

PURPOSE = "point_to_point"
KEYS = "rankwise/point_to_point"
FIRST_PAUSE_SECONDS = 0.002
LONGEST_PAUSE_SECONDS = 0.1
LEFT = "it has left"


def address_key(rank: int) -> str:
    """Return the store's key for a rank's address."""
    return f"{KEYS}/address/{rank}"


class SendQueue:
    """The messages to one rank."""

    def __init__(
        self, *, rank: int, to: int, store: Store, secret: bytes, timeout_seconds: float, changed: threading.Condition
    ) -> None:
        """Start the thread, which connects to the server of rank ``to`` within ``timeout_seconds``.

        ``store`` holds that rank's address and is used only by the thread; ``changed`` is notified when everything was
        sent, or the connection broke.
        """
        self.error: str | None = None
        """Why nothing more can be sent."""
        self.is_over = False
        """Whether the thread has ended; messages not delivered by then never will be."""
        self._rank = rank
        self._to = to
        self._store = store
        self._secret = secret
        self._timeout_seconds = timeout_seconds
        self._changed = changed
        self._queue: queue.SimpleQueue[list[bytes | memoryview] | None] = queue.SimpleQueue()
        self._given_up = threading.Event()
        self._unconfirmed: deque[bool] = deque()
        """For each message that was sent but not confirmed, whether it is a value."""
        self._thread = threading.Thread(target=self._run, name=f"rankwise-to-{to}", daemon=True)
        self._thread.start()

    def put(self, head: dict[str, Any], buffers: Sequence[memoryview]) -> None:
        """Append a message to the queue."""
        self._unconfirmed.append(head["kind"] == "value")
        self._queue.put(as_sent(json_frame(head), buffers))

    def end(self) -> None:
        """End the thread once every message has arrived."""
        self._queue.put(None)

    def give_up(self) -> None:
        """End the thread as soon as possible."""
        self._given_up.set()
        self._queue.put(None)

    def num_lost(self) -> int:
        """Return how many values are not confirmed."""
        return sum(list(self._unconfirmed))

    def _run(self) -> None:
        try:
            sock = self._connected()
            if sock is not None:
                with sock:
                    self._send_all(sock)
        except (OSError, RankwiseError) as error:
            self.error = str(error) or type(error).__name__
        finally:
            self._store.close()
            with self._changed:
                self.is_over = True
                self._changed.notify_all()

    def _connected(self) -> socket.socket | None:
        """Return the connection, waiting until the other rank listens; ``None`` after :meth:`give_up`."""
        pause = FIRST_PAUSE_SECONDS
        key = address_key(self._to)
        # Torch's stores would wait in C++, where the thread cannot be stopped.
        while not self._store.check(key):
            if self._given_up.wait(pause):
                return None
            pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)
        host, port = json.loads(self._store.get(key, self._timeout_seconds))
        return open_connection(host, port, self._secret, PURPOSE, self._timeout_seconds)

    def _send_all(self, sock: socket.socket) -> None:
        try:
            sock.sendall(json_frame({"rank": self._rank}))
            while (message := self._queue.get()) is not None:
                for piece in message:
                    sock.sendall(piece)
                with contextlib.suppress(BlockingIOError):
                    self._confirm(sock.recv(4096, socket.MSG_DONTWAIT))
            if self._given_up.is_set():
                return
            with contextlib.suppress(OSError):  # a rank that received everything may have left
                sock.sendall(json_frame({"kind": "end"}))
                sock.shutdown(socket.SHUT_WR)
        finally:
            # Even after the connection broke: messages confirmed before have arrived.
            with contextlib.suppress(OSError):
                while self._unconfirmed and not self._given_up.is_set():
                    self._confirm(sock.recv(4096))

    def _confirm(self, confirmations: bytes) -> None:
        if not confirmations:
            raise ConnectionError("the other rank ended the connection")
        for _ in confirmations:
            self._unconfirmed.popleft()


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
