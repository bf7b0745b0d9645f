# SPDX-License-Identifier: Apache-2.0
"""Messages between workers and servers, and the connections that a server receives them on.

A message is a head of JSON, then bytes whose sizes the head gives. Tensors lie in one buffer, private or shared with a
process of the same host. Nothing from the network is run or unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from rankwise.comm.backends.choose import home_of
from rankwise.comm.backends.mapping import PAGE_BYTES, Mapping
from rankwise.comm.backends.torch_group import TorchGroup
from rankwise.store.server import AuthenticatedServer
from rankwise.store.wire import as_sent, fill_on_loop, json_frame, receive_frame_on_loop
from rankwise.tensors.arrays import memory_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.world.facts import World

Head = dict[str, Any]
PURPOSE = "parameter_server"
SECRET_KEY = "rankwise/parameter_server/secret"  # noqa: S105 - where it is kept


@dataclass(slots=True)
class TensorRows:
    """Some rows of a tensor."""

    position: int
    """Of the tensor in the buffer."""
    indices: torch.Tensor
    """[n], int64."""
    values: torch.Tensor
    """[n, ...], of the tensor's dtype; on the CPU, contiguous."""

    def memory(self) -> list[memoryview]:
        """Return the memory of both."""
        return [memory_of(part) for part in (self.indices, self.values)]


@dataclass(slots=True)
class ServerMessage:
    """A head, and the rows that follow it."""

    head: Head
    rows: list[TensorRows] = field(default_factory=list[TensorRows])


def packed(
    head: Head, body: TensorBuffer, positions: Sequence[int], rows: Sequence[TensorRows], *, is_shared: bool
) -> list[bytes | memoryview]:
    """Return the pieces of a message, in order: its head, tensors of ``body`` by position, and rows of others.

    If ``is_shared``, the other end reads the body's memory itself, and its tensors are not sent.
    """
    whole = {"whole": list(positions), "rows": [[one.position, len(one.indices)] for one in rows]}
    pieces = [] if is_shared else body.pieces(positions)
    return as_sent(json_frame(head | whole), [*pieces, *(memory for one in rows for memory in one.memory())])


def receive_buffers(head: Head, body: TensorBuffer, *, is_shared: bool) -> tuple[list[memoryview], list[TensorRows]]:
    """Return the memory to read the rest of a message into, in order, and the rows that lie in it."""
    pieces = [] if is_shared else body.pieces(head["whole"])
    rows: list[TensorRows] = []
    for position, count in head["rows"]:
        like = body.views[position]
        one = TensorRows(
            position, torch.empty(count, dtype=torch.int64), torch.empty((count, *like.shape[1:]), dtype=like.dtype)
        )
        rows.append(one)
        pieces += one.memory()
    return pieces, rows


ALIGNMENT_BYTES = 64


def _starts(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return where each value begins, and the end of the last, in bytes."""
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    return starts


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(shape[dim], 1)
    return strides


class TensorBuffer:
    """Memory on the CPU for one value of each of some tensors, to send or to share.

    Args:
        tensors: give the shapes and dtypes.
        mapping: from :func:`create_memory` or :func:`open_memory`; ``None`` allocates private memory, of which the
            system provides each page when it is first written.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], mapping: Mapping | None = None) -> None:
        self._starts = _starts(tensors)
        self._ends = [start + tensor.nbytes for start, tensor in zip(self._starts, tensors, strict=False)]
        size = [self._starts[-1]]
        memory = (
            torch.empty(size, dtype=torch.uint8) if mapping is None else mapping.tensor(PAGE_BYTES, size, torch.uint8)
        )
        self._bytes = memory_of(memory)
        typed = {dtype: memory.view(dtype) for dtype in {tensor.dtype for tensor in tensors}}
        self.views = [
            typed[tensor.dtype].as_strided(
                tensor.shape, contiguous_strides(tensor.shape), start // tensor.element_size()
            )
            for start, tensor in zip(self._starts, tensors, strict=False)
        ]
        """By position, each contiguous."""

    def pieces(self, positions: Sequence[int]) -> list[memoryview]:
        """Return the memory of tensors at ascending positions, in order; neighbours are one piece."""
        if not positions:
            return []
        breaks = [0, *(at for at, (a, b) in enumerate(pairwise(positions), 1) if b != a + 1), len(positions)]
        ranges = [(positions[first], positions[last - 1]) for first, last in pairwise(breaks)]
        return [self._bytes[self._starts[first] : self._ends[last]] for first, last in ranges]


def shared_home(exchange: Exchange, world: World) -> str:
    """Return a key that is equal on ranks that can share memory; empty if this rank must not share any."""
    # If CPU ranks use Gloo, the user asked for it, or shared memory does not work here.
    if isinstance(exchange, TorchGroup) and world.device == "cpu":
        return ""
    home = home_of(world)
    return "" if home.startswith("!") else home


def create_memory(tensors: Sequence[torch.Tensor]) -> Mapping | None:
    """Return shared memory for one value of each of ``tensors``; ``None`` if the machine refuses it."""
    try:
        return Mapping.create(PAGE_BYTES + _starts(tensors)[-1])
    except OSError:
        return None


def open_memory(ticket: str, tensors: Sequence[torch.Tensor]) -> Mapping | None:
    """Return the memory of ``ticket``, created for tensors of the same shapes; ``None`` if it cannot be opened."""
    try:
        return Mapping.open(ticket, PAGE_BYTES + _starts(tensors)[-1]) if ticket else None
    except OSError:
        return None


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
