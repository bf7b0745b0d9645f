# SPDX-License-Identifier: Apache-2.0
"""Thousands of ranks in one process: each runs rankwise's own code, but takes turns with the others on one thread.

A rank of ten thousand is to cost as little as possible here, since all share the machine with the server that is
measured. Its code waits in three places: for an answer of the store, for its other thread, and for time to pass. There,
greenlets let the next rank run. All else is the code of ``rankwise.join()`` and of the failure detector.
"""

from __future__ import annotations

import heapq
import itertools
import select
import socket
import threading
import time
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from greenlet import getcurrent, greenlet

from rankwise.health import failure_detector, process_probe
from rankwise.store.keys import LARGEST_FRAME_BYTES, PURPOSE, REQUEST
from rankwise.store.shared_socket import CLOSED, Lost
from rankwise.store.wire import (
    NUMBER,
    Nonces,
    checked_length,
    frame,
    hello,
    is_proof,
    new_nonce,
    parse_hello,
    prepare,
    proof,
    send_frame,
)

if TYPE_CHECKING:
    from collections.abc import Callable

READ_BYTES = 1 << 18
MOST_TURNS = 16
"""How many ranks run before sockets are looked at."""
PAUSE_SECONDS = 0.01


class Counted:
    """Requests of the store's clients in this process, and the bytes of those that were answered, both ways."""

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0

    def take(self) -> dict[str, int]:
        """Return the counts since the last time."""
        taken = {"messages": self.messages, "bytes": self.bytes}
        self.messages = self.bytes = 0
        return taken


class Turn:
    """A greenlet that waits: for :meth:`Turns.wake`, or for time to pass."""

    __slots__ = ("is_over", "one")

    def __init__(self) -> None:
        self.one = getcurrent()
        self.is_over = False


class Turns:
    """Lets greenlets run in turn: those that were started or woken, and those whose socket or time has come."""

    def __init__(self) -> None:
        """Belongs to the greenlet that creates it, which gives the turns in :meth:`run_until`."""
        self._main = getcurrent()
        self._poll = select.epoll()
        self._on_ready: dict[int, Callable[[], None]] = {}
        self._next: deque[tuple[greenlet, tuple[Any, ...]]] = deque()
        self._timers: list[tuple[float, int, Turn]] = []
        self._numbers = itertools.count()

    def start(self, act: Callable[..., None], *arguments: object) -> greenlet:
        """Have a greenlet of its own call a function."""
        one = greenlet(act, self._main)
        self._next.append((one, arguments))
        return one

    def wait(self, turn: Turn, seconds: float) -> bool:
        """Let others run until this one is woken; return whether it was, within the time."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), turn))
        return bool(self._main.switch())

    def wake(self, turn: Turn, *, in_time: bool = True) -> None:
        """Let a greenlet that waits go on."""
        if not turn.is_over:
            turn.is_over = True
            self._next.append((turn.one, (in_time,)))

    def sleep(self, seconds: float) -> None:
        """Let others run for some time."""
        self.wait(Turn(), seconds)

    def when_ready(self, descriptor: int, events: int, act: Callable[[], None]) -> None:
        """Call a function whenever a descriptor is ready."""
        if descriptor in self._on_ready:
            self._poll.modify(descriptor, events)
        else:
            self._poll.register(descriptor, events)
        self._on_ready[descriptor] = act

    def forget(self, descriptor: int) -> None:
        """Call nothing for a descriptor any more."""
        if self._on_ready.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def run_until(self, is_done: Callable[[], bool], seconds: float) -> bool:
        """Give turns until a condition holds; return whether it does within the time."""
        deadline = time.monotonic() + seconds
        while True:
            # No more at once: what arrives meanwhile has a time limit at the server.
            for _ in range(min(len(self._next), MOST_TURNS)):
                one, arguments = self._next.popleft()
                one.switch(*arguments)
            if is_done():
                return True
            now = time.monotonic()
            if now > deadline:
                return False
            while self._timers and (self._timers[0][0] <= now or self._timers[0][2].is_over):
                self.wake(heapq.heappop(self._timers)[2], in_time=False)
            until = min(deadline, self._timers[0][0] if self._timers else deadline)
            for descriptor, _ in self._poll.poll(0 if self._next else max(until - now, 0)):
                act = self._on_ready.get(descriptor)
                if act is not None:
                    act()


class Socket:
    """A rank's connection to the store, with the methods of :class:`rankwise.store.shared_socket.SharedSocket`."""

    def __init__(
        self, turns: Turns, counted: Counted, address: tuple[str, int], secret: bytes, limit_seconds: float
    ) -> None:
        """Connect, with the handshake of :func:`rankwise.store.wire.open_connection`."""
        self._turns = turns
        self._counted = counted
        self._arrived = bytearray()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[Turn, object]] = {}
        self._answers: dict[int, bytes] = {}
        self._greetings: deque[bytes] = deque()
        self._users: set[int] = set()
        self._is_open = False
        deadline = time.monotonic() + limit_seconds
        while not self._is_open:
            try:
                self._connect(address, secret, deadline)
            except OSError:  # The server has no room for so many strangers.
                if time.monotonic() > deadline:
                    raise
                turns.sleep(PAUSE_SECONDS)

    def _connect(self, address: tuple[str, int], secret: bytes, deadline: float) -> None:
        turns, self._turn = self._turns, Turn()
        self._arrived.clear()
        self._greetings.clear()
        self._socket = socket.socket()
        self._socket.setblocking(False)
        self._socket.connect_ex(address)
        turns.when_ready(self._socket.fileno(), select.EPOLLOUT, lambda: turns.wake(self._turn))
        if not turns.wait(self._turn, deadline - time.monotonic()):
            raise Lost("no connection")
        # From now on it is read when something is there, and what is sent waits for its place: the server reads on.
        self._socket.setblocking(True)
        prepare(self._socket)
        turns.when_ready(self._socket.fileno(), select.EPOLLIN, self._read)
        nonce = new_nonce()
        send_frame(self._socket, hello(nonce, PURPOSE))
        nonces = Nonces(client=nonce, server=parse_hello(self._greeting(deadline))[0])
        send_frame(self._socket, proof(secret, b"client", PURPOSE, nonces))
        if not is_proof(self._greeting(deadline)[1:], secret, b"server", PURPOSE, nonces):
            raise ValueError("the server's proof is wrong")
        self._is_open = True

    def _greeting(self, deadline: float) -> bytes:
        if not self._greetings:
            self._turn = Turn()
            if not self._turns.wait(self._turn, deadline - time.monotonic()) or not self._greetings:
                raise Lost("no greeting")
        return self._greetings.popleft()

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close()
            return
        self._arrived += data
        start = 0
        while (body := start + NUMBER.size) <= len(self._arrived):
            end = body + checked_length(self._arrived[start:body], LARGEST_FRAME_BYTES)
            if end > len(self._arrived):
                break
            self._take(bytes(self._arrived[body:end]))
            start = end
        del self._arrived[:start]

    def _take(self, data: bytes) -> None:
        if not self._is_open:
            self._greetings.append(data)
            self._turns.wake(self._turn)
            return
        (number,) = REQUEST.unpack_from(data)
        waiting = self._waiting.pop(number, None)
        if waiting is not None:
            self._answers[number] = data[REQUEST.size :]
            self._turns.wake(waiting[0])

    def _close(self) -> None:
        self._turns.forget(self._socket.fileno())
        self._socket.close()
        self._turns.wake(self._turn)
        for turn, _ in self._waiting.values():
            self._turns.wake(turn)
        self._waiting.clear()

    def ask(self, user: object, data: bytes, limit_seconds: float) -> bytes:
        """Return the answer to a request."""
        if self._socket.fileno() < 0:
            raise Lost(CLOSED)
        number, turn = next(self._numbers), Turn()
        self._counted.messages += 1
        self._waiting[number] = turn, user
        send_frame(self._socket, REQUEST.pack(number) + data)
        if not self._turns.wait(turn, limit_seconds) or number not in self._answers:
            self._waiting.pop(number, None)
            raise Lost(CLOSED if self._socket.fileno() < 0 else "timed out")
        answer = self._answers.pop(number)
        self._counted.bytes += len(data) + len(answer)
        return answer

    def join(self, user: object) -> None:
        """Keep the connection open for ``user``."""
        self._users.add(id(user))

    def leave(self, user: object) -> None:
        """Close the connection, unless others use it."""
        self._users.discard(id(user))
        if not self._users and self._socket.fileno() >= 0:
            self._close()

    def drop(self) -> None:
        """Close the connection for all its users."""
        if self._socket.fileno() >= 0:
            self._close()

    def end_waits(self, user: object) -> None:
        """Have the requests of ``user`` that wait for a key end as if their time had passed."""
        for number, (_, asker) in list(self._waiting.items()):
            if asker is user:
                send_frame(self._socket, REQUEST.pack(0) + b"".join(map(frame, [b"cancel", REQUEST.pack(number)])))


class Thread:
    """A greenlet in place of a thread."""

    def __init__(
        self, turns: Turns, *, target: Callable[..., None], args: tuple[object, ...], name: str, daemon: bool
    ) -> None:
        del name, daemon
        self._turns = turns
        self._act, self._arguments = target, args
        self._waiting: list[Turn] = []
        self._is_alive = True

    def start(self) -> None:
        """Begin."""
        self._turns.start(self._run)

    def _run(self) -> None:
        try:
            self._act(*self._arguments)
        finally:
            self._is_alive = False
            for turn in self._waiting:
                self._turns.wake(turn)

    def is_alive(self) -> bool:
        """Return whether it has not ended."""
        return self._is_alive

    def join(self, seconds: float) -> None:
        """Wait until it has ended."""
        if self._is_alive:
            self._waiting.append(Turn())
            self._turns.wait(self._waiting[-1], seconds)


class Condition:
    """What greenlets wait for in place of threads; nobody else runs between two waits, so nothing is locked."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._waiting: list[Turn] = []

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        pass

    def wait_for(self, is_so: Callable[[], bool], seconds: float) -> bool:
        """Wait until something is so, as far as others notify of it."""
        deadline = time.monotonic() + seconds
        while not is_so() and (left := deadline - time.monotonic()) > 0:
            self._waiting.append(Turn())
            self._turns.wait(self._waiting[-1], left)
        return is_so()

    def notify_all(self) -> None:
        """Have all look again."""
        for turn in self._waiting:
            self._turns.wake(turn)
        self._waiting.clear()


def take_turns(turns: Turns) -> None:
    """Have the failure detectors of this process use greenlets in place of threads."""
    detector: Any = failure_detector
    detector.threading = SimpleNamespace(
        Thread=partial(Thread, turns), Condition=partial(Condition, turns), get_ident=threading.get_ident
    )
    detector.hold_during_forks = lambda _: None
    probe: Any = process_probe
    probe.time = SimpleNamespace(sleep=turns.sleep, monotonic=time.monotonic)
