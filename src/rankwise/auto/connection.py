# SPDX-License-Identifier: Apache-2.0
"""The connection between rank zero, which runs the script, and one server: requests, replies, and tensors with them.

Requests and replies alternate. Tensors lie in memory that both share on one host, and follow the message otherwise.
"""

from __future__ import annotations

import json
import pickle
import queue
import secrets
import select
import struct
import threading
from typing import TYPE_CHECKING, Any

import torch

from rankwise.auto.memory import SharedBytes, lay_out
from rankwise.comm.point_to_point.waiting import PeerWait, wait
from rankwise.store import bootstrap
from rankwise.store.server import AuthenticatedServer
from rankwise.store.wire import listen, open_connection, prepare, receive_frame_on_loop, send_frame
from rankwise.tensors.arrays import memory_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from rankwise.auto.memory import Ticket
    from rankwise.comm.session import Session
    from rankwise.health.failure_detector import FailureDetector
    from rankwise.store.values import Store

_PURPOSE = "auto"
_KEY = "rankwise/auto/address"
_HEAD = struct.Struct(">Q")
_BUFFER_BYTES = 2**16
_LEAST_BYTES = 2**20
_LOOK_SECONDS = 1.0
"""After how long a waiting rank looks whether the job has failed, and what has become of the other one."""


class _Readiness(threading.Condition):
    """Notified by the kernel: when a socket can be read or written."""

    def __init__(self, sock: socket.socket, event: int) -> None:
        super().__init__()
        self._poll = select.poll()
        self._poll.register(sock, event)

    def is_there(self) -> bool:
        return bool(self._poll.poll(0))

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> bool:  # noqa: ARG002 - as above
        return bool(self._poll.poll(None if timeout is None else 1000 * timeout))


class Connection:
    """One end of it.

    Args:
        sock: connected.
        peer: the rank at the other end.
        detector: of this rank.
    """

    def __init__(self, sock: socket.socket, peer: int, detector: FailureDetector) -> None:
        prepare(sock)
        sock.settimeout(_LOOK_SECONDS)
        self._sock = sock
        self._peer = peer
        self._readable = _Readiness(sock, select.POLLIN)
        self._detector = detector
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._unread = self._buffer[:0]
        self._sent: SharedBytes | None = None
        self._received: SharedBytes | None = None
        self.is_local = False
        """Whether both ends share memory."""

    def greet(self) -> None:
        """Find out whether both ends share memory. Called by: both ends."""
        try:
            self._sent = SharedBytes(_LEAST_BYTES)
        except OSError:
            self._sent = None
        self._send_pickled(None if self._sent is None else self._sent.ticket)
        ticket = self._receive_pickled()
        try:
            self._received = None if ticket is None else SharedBytes(0, ticket)
        except OSError:
            self._received = None
        self._send_pickled(self._received is not None)
        self.is_local = self._receive_pickled() and self._received is not None

    def send(self, message: object, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a message. The tensors are copied at once.

        Raises:
            ConnectionError: the other end is gone.
        """
        places, num_bytes = lay_out(tensors)
        ticket = self._make_room(num_bytes) if self.is_local else None
        memory = self._sent if self.is_local else None
        if memory is not None and memory.num_bytes >= num_bytes:
            for place, one in zip(places, tensors, strict=True):
                memory.at(place).copy_(one.detach())
            self._send_pickled((message, places, True, ticket))
            return
        self._send_pickled((message, places, False, None))
        for (_, shape, strides, dtype), one in zip(places, tensors, strict=True):
            flat = torch.empty(one.numel(), dtype=dtype)
            flat.as_strided(shape, strides).copy_(one.detach())
            self._send_all(memory_of(flat))

    def await_request(self) -> None:
        """Return when a message begins to arrive, or none can: the script may do something else for days.

        Raises:
            RankwiseError: the job has failed.
        """
        while not (self._unread or self._readable.wait_for(bool, _LOOK_SECONDS)):
            if self._detector.error is not None:
                raise self._detector.error

    def receive(self) -> tuple[Any, list[torch.Tensor]]:
        """Return the next message and its tensors, which are valid until this end sends again.

        Raises:
            ConnectionError: the other end is gone.
            RankwiseError: the job has failed, or the other end stops in the middle.
        """
        message, places, is_shared, ticket = self._receive_pickled()
        if ticket is not None:
            self._received = SharedBytes(0, ticket)
        if is_shared and self._received is not None:
            return message, [self._received.at(place) for place in places]
        tensors: list[torch.Tensor] = []
        for _, shape, strides, dtype in places:
            flat = torch.empty(torch.Size(shape).numel(), dtype=dtype)
            self._fill(memory_of(flat))
            tensors.append(flat.as_strided(shape, strides))
        return message, tensors

    def close(self) -> None:
        """End it."""
        self._sock.close()

    def _make_room(self, num_bytes: int) -> Ticket | None:
        """Return the ticket of larger memory, if a message needs it."""
        if self._sent is None or num_bytes <= self._sent.num_bytes:
            return None
        try:
            self._sent = SharedBytes(max(num_bytes, 2 * self._sent.num_bytes))
        except OSError:
            return None
        return self._sent.ticket

    def _send_pickled(self, value: object) -> None:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        self._send_all(memoryview(_HEAD.pack(len(data)) + data))

    def _receive_pickled(self) -> Any:
        head = bytearray(_HEAD.size)
        self._fill(memoryview(head))
        data = bytearray(_HEAD.unpack(head)[0])
        self._fill(memoryview(data))
        return pickle.loads(data)  # noqa: S301 - the other end holds the job's secret

    def _send_all(self, memory: memoryview) -> None:
        done = 0
        while done < memory.nbytes:
            try:
                done += self._sock.send(memory[done:])
            except TimeoutError:
                self._wait(_Readiness(self._sock, select.POLLOUT))

    def _fill(self, memory: memoryview) -> None:
        while memory.nbytes:
            if not self._unread and memory.nbytes < _BUFFER_BYTES:
                self._unread = self._buffer[: self._received_into(self._buffer)]
            if self._unread:
                count = min(len(self._unread), memory.nbytes)
                memory[:count] = self._unread[:count]
                self._unread = self._unread[count:]
            else:
                count = self._received_into(memory)
            memory = memory[count:]

    def _received_into(self, memory: memoryview) -> int:
        while True:
            try:
                count = self._sock.recv_into(memory)
            except TimeoutError:
                self._wait(self._readable)
                continue
            if not count:
                raise ConnectionError("the other rank closed the connection")
            return count

    def _wait(self, readiness: _Readiness) -> None:
        """Return when the connection can be read or written, or has ended; say where the other rank is if it is late.

        Raises:
            RankwiseError: the job has failed, the other rank has ended, or has done nothing within the world's timeout.
        """
        late = PeerWait(
            what="a split call",
            peer=self._peer,
            detector=self._detector,
            broken=lambda: None,
            do="look where that rank is, and in which state; kill -CONT resumes one that was stopped",
        )
        wait(late, readiness, readiness.is_there)


def accept_servers(session: Session, store: Store, detector: FailureDetector) -> list[Connection]:
    """Return the connections to ranks 1, 2, .... Called by: rank zero, while the others call :func:`connect`."""
    arrived: queue.Queue[tuple[int, socket.socket]] = queue.Queue()

    async def hand_over(sock: socket.socket) -> None:
        rank = int(json.loads(await receive_frame_on_loop(sock))["rank"])
        arrived.put((rank, sock.dup()))

    secret = secrets.token_hex(32)
    host = bootstrap.address_on_job(store, session.world)
    server = AuthenticatedServer(listen(host, 0), secret.encode(), {}, {_PURPOSE: hand_over})
    server.start()
    announced = session.world.hostname if host == bootstrap.EVERY_INTERFACE else host
    store.set(_KEY, json.dumps([announced, server.port, secret]))
    sockets: dict[int, socket.socket] = {}
    while len(sockets) < session.world.world_size - 1:
        try:
            rank, sock = arrived.get(timeout=_LOOK_SECONDS)
            sockets[rank] = sock
        except queue.Empty:
            if detector.error is not None:
                raise detector.error from None
    server.close()
    connections = [Connection(sockets[rank], rank, detector) for rank in sorted(sockets)]
    for one in connections:
        one.greet()
    return connections


def connect(session: Session, store: Store, detector: FailureDetector) -> Connection:
    """Return the connection to rank zero. Called by: every other rank."""
    host, port, secret = json.loads(store.get(_KEY, detector.timeout_seconds))
    sock = open_connection(host, port, secret.encode(), _PURPOSE, detector.timeout_seconds)
    send_frame(sock, json.dumps({"rank": session.world.rank}).encode())
    connection = Connection(sock, 0, detector)
    connection.greet()
    return connection
