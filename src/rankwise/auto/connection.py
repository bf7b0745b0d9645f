# SPDX-License-Identifier: Apache-2.0
"""The connection between rank zero, which runs the script, and one server: requests, replies, and tensors with them.

Requests and replies alternate. Tensors lie in memory that both share on one host, and follow the message otherwise.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import pickle
import queue
import secrets
import select
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from rankwise.health.collective_timeout import PeerWait, wait_for_peer
from rankwise.store import bootstrap
from rankwise.store.server import AuthenticatedServer
from rankwise.store.wire import listen, open_connection, prepare, receive_frame_on_loop, send_frame
from rankwise.tensors.arrays import memory_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from rankwise.auto.settings import GeneratorStates, Settings
    from rankwise.comm.session import Session
    from rankwise.health.failure_detector import FailureDetector
    from rankwise.store.client import Store

    Ticket = tuple[int, int, int, bytes]
    """What another process of the host needs to open it: process, descriptor, size in bytes, token."""
    Place = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
    """A tensor in it: its first byte, shape and strides, and dtype."""


_TOKEN_BYTES = 16
_LINE_BYTES = 64


class SharedBytes:
    """A piece of memory, allocated in full: a write never fails."""

    def __init__(self, num_bytes: int, ticket: Ticket | None = None) -> None:
        """Create it, or open the one of a ticket.

        Raises:
            OSError: there is not enough memory, or the ticket is not of this host.
        """
        if ticket is None:
            self._descriptor = os.memfd_create("rankwise-auto", os.MFD_CLOEXEC)
            token = secrets.token_bytes(_TOKEN_BYTES)
            try:
                os.posix_fallocate(self._descriptor, 0, _LINE_BYTES + num_bytes)
                os.pwrite(self._descriptor, token, 0)
            except BaseException:
                self.close()
                raise
            self.ticket: Ticket = (os.getpid(), self._descriptor, num_bytes, token)
        else:
            process, descriptor, num_bytes, token = self.ticket = ticket
            self._descriptor = os.open(f"/proc/{process:d}/fd/{descriptor:d}", os.O_RDWR | os.O_CLOEXEC)
            if os.pread(self._descriptor, _TOKEN_BYTES, 0) != token:
                self.close()
                message = f"/proc/{process}/fd/{descriptor} is other memory"
                raise OSError(message)
        self.num_bytes = num_bytes
        self._memory = mmap.mmap(self._descriptor, _LINE_BYTES + num_bytes)

    def at(self, place: Place) -> torch.Tensor:
        """Return a tensor that is this memory. Each one counts its changes for itself."""
        start, shape, strides, dtype = place
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype, device="cpu")
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=_LINE_BYTES + start)
        return flat.as_strided(shape, strides)

    def close(self) -> None:
        """Let no other process open it from now on. It exists as long as a tensor in it does."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()


def lay_out(tensors: Sequence[torch.Tensor]) -> tuple[list[Place], int]:
    """Return a place for each tensor, one after the other and in its own memory format, and the bytes of all."""
    places: list[Place] = []
    end = 0
    for one in tensors:
        places.append((end, tuple(one.shape), dense_strides(one), one.dtype))
        end += -(-one.numel() * one.element_size() // _LINE_BYTES) * _LINE_BYTES
    return places, end


def dense_strides(like: Any) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps whose dims lie in memory as those of ``like`` do."""
    strides, step = [0] * like.dim(), 1
    # A dim of size one may have any stride; of equal ones the last is the innermost.
    for dim in sorted(range(like.dim()), key=lambda one: (like.stride(one), -one)):
        strides[dim] = step
        step *= max(like.shape[dim], 1)
    return tuple(strides)


_PURPOSE = "auto"
_KEY = "rankwise/auto/address"
_HEAD = struct.Struct(">Q")
_BUFFER_BYTES = 2**16
_LEAST_BYTES = 2**20
_FAILURE_POLL_SECONDS = 1.0
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
        sock.settimeout(_FAILURE_POLL_SECONDS)
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
            flat = torch.empty(one.numel(), dtype=dtype, device="cpu")
            flat.as_strided(shape, strides).copy_(one.detach())
            self._send_all(memory_of(flat))

    def await_request(self) -> None:
        """Return when a message begins to arrive, or none can: the script may do something else for days.

        Raises:
            RankwiseError: the job has failed.
        """
        while not (self._unread or self._readable.wait_for(bool, _FAILURE_POLL_SECONDS)):
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
            flat = torch.empty(torch.Size(shape).numel(), dtype=dtype, device="cpu")
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
        wait_for_peer(late, readiness, readiness.is_there)


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
            rank, sock = arrived.get(timeout=_FAILURE_POLL_SECONDS)
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


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A parameter or buffer that a server has not seen yet."""

    number: int
    kind: Literal["parameter", "buffer"]
    requires_grad: bool
    is_on_cpu: bool
    """Or on the device of each rank."""
    place: Place
    memory: Ticket | None
    """Where all ranks see its values, at that place; ``None``: they are sent."""


@dataclass(frozen=True, slots=True)
class Values:
    """Parameters and buffers before a call."""

    new: list[TensorFacts]
    sent: list[int]
    """Numbers of those whose values come from rank zero."""
    by_broadcast: bool
    """Whether they come in a broadcast after the message, not with it."""
    dropped: list[int]
    """Numbers of those that no longer exist."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor in a message, sent with it: the rows of one rank, or a tensor that has none."""

    requires_grad: bool = False
    is_on_cpu: bool = True
    """Or on the device of each rank."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Compute the rows of one call of a module. Its many fields are one message: all that a server needs for that."""

    call: int
    module: int
    kind: int
    """Calls of one kind draw random numbers alike."""
    pickled: bytes | None
    """The module, if a server has not seen it as it is."""
    values: Values
    forgotten: list[int]
    """Calls that no backward will follow."""
    structure: bytes | None
    """Of the arguments, if a server has not seen this kind of call."""
    leaves: list[Any]
    dims: tuple[int | None, ...]
    num_global: int
    has_graph: bool
    meets: bool
    """Whether ranks exchange statistics within the call: then each tells the others how it ended."""
    settings: Settings
    generators: GeneratorStates | None
    """``None``: the call draws nothing."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """The rows of the outputs of a call, flat, or the gradients of what it was called with."""

    leaves: list[Any]


@dataclass(frozen=True, slots=True)
class Backward:
    """Compute the gradients of the rows of a call."""

    call: int
    keeps_graph: bool
    given: list[int]
    """Numbers of the outputs whose gradients are sent with the message."""
    meets: bool
    """Whether ranks exchange something in it: then each tells the others how its part ended."""
    adds: bool
    """Whether all ranks add the gradients of parameters; otherwise rank zero gets them, and adds them."""


@dataclass(frozen=True, slots=True)
class Failed:
    """What a server was asked for has raised."""

    kind: str
    text: str
    trace: str


@dataclass(frozen=True, slots=True)
class End:
    """The script has ended."""
