# SPDX-License-Identifier: Apache-2.0
"""Messages to one other rank: a queue, and a thread that sends it, so that callers do not wait."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from rankwise.errors import RankwiseError
from rankwise.store.wire import as_sent, json_frame, open_connection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.store.values import Store

PURPOSE = "point_to_point"
KEYS = "rankwise/point_to_point"
FIRST_PAUSE_SECONDS = 0.002
LONGEST_PAUSE_SECONDS = 0.1


def address_key(rank: int) -> str:
    """Return the store's key for a rank's address."""
    return f"{KEYS}/address/{rank}"


class SendQueue:
    """The connection to one rank. Its thread starts with the first message."""

    def __init__(
        self, *, rank: int, to: int, store: Store, secret: bytes, timeout_seconds: float, changed: threading.Condition
    ) -> None:
        """Open nothing yet.

        Args:
            rank: of this process.
            to: the receiving rank.
            store: holds that rank's address; a connection used only by the thread.
            secret: of all ranks' servers.
            timeout_seconds: how long to try to connect.
            changed: notified when everything was sent, or the connection broke.
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

    # -- the thread --------------------------------------------------------------------------------

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
