# SPDX-License-Identifier: Apache-2.0
"""What goes out to one other rank: a queue, and a thread that sends it, so that nobody waits for the other."""

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
    """Return the store's key of where a rank listens."""
    return f"{KEYS}/address/{rank}"


class SendQueue:
    """The way to one rank. Its thread starts with the first message."""

    def __init__(
        self, *, rank: int, to: int, store: Store, secret: bytes, timeout_seconds: float, changed: threading.Condition
    ) -> None:
        """Open nothing yet.

        Args:
            rank: of this process.
            to: who gets it.
            store: says where that rank listens; a connection for the thread alone.
            secret: of all ranks' servers.
            timeout_seconds: how long to try to connect.
            changed: told when everything has gone, or the way has broken.
        """
        self.error: str | None = None
        """Why nothing can be sent any more."""
        self.is_over = False
        """Whether the thread has ended; what has not come by then never will."""
        self._rank = rank
        self._to = to
        self._store = store
        self._secret = secret
        self._timeout_seconds = timeout_seconds
        self._changed = changed
        self._queue: queue.SimpleQueue[list[bytes | memoryview] | None] = queue.SimpleQueue()
        self._given_up = threading.Event()
        self._unconfirmed: deque[bool] = deque()
        """Whether each message that has gone and is not known to have come is a value."""
        self._thread = threading.Thread(target=self._run, name=f"rankwise-to-{to}", daemon=True)
        self._thread.start()

    def put(self, head: dict[str, Any], buffers: Sequence[memoryview]) -> None:
        """Have a message sent after those before it."""
        self._unconfirmed.append(head["kind"] == "value")
        self._queue.put(as_sent(json_frame(head), buffers))

    def end(self) -> None:
        """Have the thread end when everything has come to the other rank."""
        self._queue.put(None)

    def give_up(self) -> None:
        """Have the thread end as soon as it can."""
        self._given_up.set()
        self._queue.put(None)

    def num_lost(self) -> int:
        """Return how many values are not known to have come."""
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
        """Return the connection, waiting until the other rank listens; ``None`` where that was given up."""
        pause = FIRST_PAUSE_SECONDS
        key = address_key(self._to)
        # Torch's stores would wait in C++, where nothing ends a thread.
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
            with contextlib.suppress(OSError):  # who has everything may have left
                sock.sendall(json_frame({"kind": "end"}))
                sock.shutdown(socket.SHUT_WR)
        finally:
            # Also of a connection that has broken: what was confirmed before has come.
            with contextlib.suppress(OSError):
                while self._unconfirmed and not self._given_up.is_set():
                    self._confirm(sock.recv(4096))

    def _confirm(self, confirmations: bytes) -> None:
        if not confirmations:
            raise ConnectionError("the other rank ended the connection")
        for _ in confirmations:
            self._unconfirmed.popleft()
