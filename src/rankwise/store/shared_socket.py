# SPDX-License-Identifier: Apache-2.0
"""One socket to a store, over which several threads of a process ask at once: of those that wait, one reads for all.

A rank has one connection however many of its threads use the store: the serving process has a limit of open files.
Knows requests as bytes only. Used by ``client``.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from rankwise.errors import RankwiseError
from rankwise.store.keys import LARGEST_FRAME_BYTES, REQUEST
from rankwise.store.wire import NUMBER, checked_length, frame

if TYPE_CHECKING:
    from collections.abc import Callable

READ_BYTES = 1 << 18
LONGEST_POLL_SECONDS = 10.0**6
"""The operating system accepts no limits longer than a few weeks."""
CLOSED = "the connection was closed"
CUT = "an interrupt of another thread cut the connection"
FORKED = "the connection belongs to the process that this one was forked from"
ONLY_ONCE = tuple(frame(word) for word in (b"add", b"append"))
"""How requests begin that are not repeated over a new connection: they may have been carried out."""


class Lost(ConnectionError):
    """The connection ended, or the store does not answer."""


class _Request:
    """A request that waits for its answer, and who asked."""

    __slots__ = ("data", "is_sent", "user")

    def __init__(self, user: object, data: bytes) -> None:
        self.user = user
        self.data = data
        self.is_sent = False


class SharedSocket:
    """An open connection, and the requests that wait for an answer. Closed with the last of its users."""

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        """Open it by ``connect``, which is called again if an interrupt cuts a request or an answer in two."""
        self._connect = connect
        self._socket = connect()
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Request] = {}
        self._answers: dict[int, bytes] = {}
        self._arrived = bytearray()
        self._reader: int | None = None
        """The number of the request whose thread reads for all."""
        self._process = os.getpid()
        self._is_cut = False
        """Whether an interrupt ended a thread in the middle of sending or reading."""
        self._lost: str | None = None
        self._users: set[int] = set()

    def join(self, user: object) -> None:
        """Keep the connection open for ``user``."""
        self._users.add(id(user))

    def leave(self, user: object) -> None:
        """Close the connection, unless others use it."""
        self._users.discard(id(user))
        if not self._users and self._socket.fileno() >= 0:
            self._lose(CLOSED)

    def drop(self) -> None:
        """Close the socket when Python ends: nothing else may be used then."""
        self._socket.close()

    def end_waits(self, user: object) -> None:
        """Have the requests of ``user`` that wait for a key end as if their time had passed."""
        for number, request in list(self._pending.items()):
            if request.user is user:
                cancel = b"".join(map(frame, [b"cancel", REQUEST.pack(number)]))
                with suppress(OSError):
                    self._send(0, cancel)

    def ask(self, user: object, data: bytes, limit_seconds: float) -> bytes:
        """Return the answer to a request.

        Raises:
            Lost: the connection ended, or there is no answer within ``limit_seconds``.
        """
        if self._process != os.getpid():  # Takes no lock: a thread of that process may have held it.
            self._lost = self._lost or FORKED
        self._refuse_if_lost()
        deadline = time.monotonic() + limit_seconds
        number = next(self._numbers)
        try:
            self._send(number, data, _Request(user, data))
            return self._wait(number, deadline)
        finally:
            self._pending.pop(number, None)
            self._answers.pop(number, None)

    def _refuse_if_lost(self) -> None:
        if self._lost is not None:
            raise Lost(self._lost)

    def _send(self, number: int, data: bytes, request: _Request | None = None) -> None:
        with self._sending:
            self._refuse_if_lost()
            if request is not None:
                self._pending[number] = request
            if self._is_cut:  # The next thread to read opens another connection, and sends what is pending.
                return
            try:
                self._socket.sendall(frame(REQUEST.pack(number) + data))
                if request is not None:
                    request.is_sent = True
            except OSError as error:
                if self._is_cut:
                    return
                self._lose(str(error) or type(error).__name__)
                raise Lost(self._lost) from error
            except BaseException:
                self._cut()
                raise

    def _wait(self, number: int, deadline: float) -> bytes:
        while True:
            try:
                with self._changed:
                    self._changed.wait_for(
                        lambda: number in self._answers or self._lost is not None or self._reader is None,
                        _bounded(deadline - time.monotonic()),
                    )
                    if number in self._answers:
                        return self._answers.pop(number)
                    self._refuse_if_lost()
                    if self._reader is not None:
                        self._lose("timed out")
                        self._refuse_if_lost()
                    self._reader = number
                self._read_or_lose(number, deadline)
            finally:
                self._end_reading(number)

    def _end_reading(self, number: int) -> None:
        """Let another thread read, if that of request ``number`` did."""
        with self._changed:
            if self._reader == number:
                self._reader = None
                if self._lost is not None:
                    self._socket.close()
                self._changed.notify_all()

    def _read_or_lose(self, number: int, deadline: float) -> None:
        try:
            self._read(number, deadline)
        except (OSError, RankwiseError) as error:
            self._lose(str(error) or type(error).__name__)

    def _read(self, number: int, deadline: float) -> None:
        """Read answers until that to ``number`` has arrived, or the connection is lost."""
        ready: select.poll | None = None
        while number not in self._answers and self._lost is None:
            if self._is_cut:
                self._reopen()
                ready = None
                continue
            if ready is None:
                ready = select.poll()
                ready.register(self._socket, select.POLLIN)
            if not ready.poll(1000 * _bounded(deadline - time.monotonic())):
                raise TimeoutError("timed out")
            try:
                data = self._socket.recv(READ_BYTES)
                self._arrived += data
            except OSError:
                if not self._is_cut:
                    raise
                continue
            except BaseException:
                self._cut()
                raise
            if not data and not self._is_cut:
                raise Lost("the other side ended the connection")
            self._take()

    def _take(self) -> None:
        """Store the answers that have arrived whole."""
        start = 0
        while (body := start + NUMBER.size) <= len(self._arrived):
            end = body + checked_length(self._arrived[start:body], LARGEST_FRAME_BYTES)
            if end > len(self._arrived):
                break
            answer = bytes(memoryview(self._arrived)[body:end])
            (number,) = REQUEST.unpack_from(answer)
            self._give(number, answer[REQUEST.size :])
            start = end
        if start:
            del self._arrived[:start]

    def _give(self, number: int, answer: bytes) -> None:
        with self._changed:
            # Nobody waits any more for one that was interrupted.
            if number in self._pending:
                self._answers[number] = answer
                self._changed.notify_all()

    def _cut(self) -> None:
        """Record that an interrupt left the connection in the middle of a frame; wake the thread that reads."""
        self._is_cut = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _reopen(self) -> None:
        """Open another connection, and send what is not answered again. Called by the thread that reads."""
        with self._sending:
            before, self._socket = self._socket, self._connect()
            before.close()
            self._arrived.clear()
            for number, request in list(self._pending.items()):
                if request.is_sent and request.data.startswith(ONLY_ONCE):
                    self._give(number, b"")
                else:
                    self._socket.sendall(frame(REQUEST.pack(number) + request.data))
                    request.is_sent = True
            self._is_cut = False

    def _lose(self, why: str) -> None:
        with self._changed:
            self._lost = self._lost or why
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            if self._reader is None:
                self._socket.close()
            self._changed.notify_all()


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), LONGEST_POLL_SECONDS)
