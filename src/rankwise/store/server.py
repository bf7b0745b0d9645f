# SPDX-License-Identifier: Apache-2.0
"""A server that admits some processes only, as those that hold the job's secret: one thread, one event loop.

Knows nothing of what its services do; reads no more than a greeting and a proof from an unauthenticated client.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import threading
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from rankwise.store.wire import (
    HANDSHAKE_FRAME_BYTES,
    Answer,
    Nonces,
    checked_secret,
    close_in_children,
    frame,
    hello,
    is_proof,
    new_nonce,
    parse_hello,
    prepare,
    proof,
    receive_frame_on_loop,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

Service = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Serves one authenticated connection until it returns; the connection is then closed."""
SocketService = Callable[["socket.socket"], Awaitable[None]]
"""The same with the non-blocking socket itself: for large data, which a stream would copy once more."""
Admit = Callable[["socket.socket"], Awaitable[SocketService | None]]
"""Returns the service for a new connection; ``None`` to close it."""

MOST_STRANGERS = 256
"""How many unauthenticated connections may be open; a new one waits for another to authenticate, or replaces it."""
LEAST_HANDSHAKE_SECONDS = 0.25
"""How long a connection may take to authenticate before a new one replaces it."""
HANDSHAKE_SECONDS = 5.0
"""How long a connection may take to authenticate."""
REST_SECONDS = 0.05
"""How long nothing is accepted after the system has run out of file descriptors."""
CLOSE_SECONDS = 5.0
"""How long services may take to end when the server closes."""
BUFFER_BYTES = 256 * 1024


class SocketServer:
    """Serves one listening socket in a separate thread, from :meth:`start` to :meth:`close`.

    It is also closed when the process exits or its last reference is dropped. Processes forked from
    this one do not share it.
    """

    def __init__(self, listener: socket.socket, admit: Admit) -> None:
        """Take over a socket that is already listening on one address, and close it with the server."""
        self.loop = asyncio.new_event_loop()
        """The loop the services run on; ``asyncio.run_coroutine_threadsafe`` reaches it from other threads."""
        self.port = int(listener.getsockname()[1])
        listener.setblocking(False)
        close_in_children(listener)
        front = _Front(listener, admit)
        # The thread must not refer to this object, or the object would never be freed.
        self._thread = threading.Thread(target=_run, args=(self.loop, front), name="rankwise-server", daemon=True)
        self._close = weakref.finalize(self, _close, self.loop, front, self._thread, os.getpid())

    def start(self) -> None:
        """Start serving."""
        self._thread.start()

    def close(self) -> None:
        """Close every connection and end the thread. May be called again, from any thread."""
        self._close()


class AuthenticatedServer(SocketServer):
    """A server for processes that hold the job's secret: one service per purpose."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        services: Mapping[str, Service],
        socket_services: Mapping[str, SocketService] | None = None,
    ) -> None:
        """Take over a socket that is already listening on one address, and close it with the server.

        A client names the purpose of its connection: one of ``services``, or of ``socket_services``, which take the
        socket.
        """
        taking: dict[str, SocketService] = {
            purpose: partial(as_stream, service=service) for purpose, service in services.items()
        }
        super().__init__(listener, partial(_greet, checked_secret(secret), taking | dict(socket_services or {})))


class _Front:
    """Accepts connections and serves those that are admitted."""

    def __init__(self, listener: socket.socket, admit: Admit) -> None:
        self.listener = listener
        self._admit = admit
        self._strangers: dict[asyncio.Task[None], float] = {}
        """The unauthenticated connections, oldest first, and when each was accepted."""
        self._has_room = asyncio.Event()
        self._known: set[asyncio.Task[None]] = set()

    async def accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self.listener)
            except OSError as error:
                # No descriptor is left, or the peer has already closed: authenticated clients are still served.
                if error.errno != errno.EMFILE or not _allow_more_files():
                    await asyncio.sleep(REST_SECONDS)
                continue
            while len(self._strangers) >= MOST_STRANGERS:
                await self._make_room(loop)
            task = loop.create_task(self._serve(connection))
            self._strangers[task] = loop.time()
            task.add_done_callback(self._forget)
            # A full queue of connections must not delay authenticated clients.
            await asyncio.sleep(0)

    async def _make_room(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until an unauthenticated connection is known or closed; close the oldest once it has had its time.

        Thousands of ranks that start together are no strangers for long: the system queues those that are not accepted.
        """
        oldest = next(iter(self._strangers))
        left = self._strangers[oldest] + LEAST_HANDSHAKE_SECONDS - loop.time()
        if left > 0:
            self._has_room.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._has_room.wait()
        elif self._strangers.pop(oldest, None) is not None:
            oldest.cancel()

    def _know(self, task: asyncio.Task[None] | None) -> None:
        """Stop counting a connection as unauthenticated."""
        if task is not None:
            self._strangers.pop(task, None)
            self._has_room.set()
            self._known.add(task)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        self._has_room.set()
        self._known.discard(task)

    async def _serve(self, connection: socket.socket) -> None:
        service: SocketService | None = None
        try:
            with contextlib.suppress(OSError, ValueError):
                prepare(connection)
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    service = await self._admit(connection)
            if service is not None:
                self._know(asyncio.current_task())
                # The client may disconnect at any time; its own side reports that where it matters.
                with contextlib.suppress(ConnectionError, TimeoutError):
                    await service(connection)
        finally:
            connection.close()


def _allow_more_files() -> bool:
    """Let this process open as many files as the system allows; return whether these are more than before.

    The usual limit, 1024, is less than the ranks of a large job.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return True


async def _greet(
    secret: bytes, services: Mapping[str, SocketService], connection: socket.socket
) -> SocketService | None:
    """Return the service of a client that has authenticated, ``None`` for others."""
    nonce = new_nonce()
    await _send(connection, hello(nonce))
    client_nonce, purpose = parse_hello(await _receive(connection))
    nonces = Nonces(client=client_nonce, server=nonce)
    if not is_proof(await _receive(connection), secret, b"client", purpose, nonces):
        await _send(connection, bytes([Answer.REFUSED]))
        return None
    service = services.get(purpose)
    if service is None:
        await _send(connection, bytes([Answer.UNKNOWN_PURPOSE]))
        return None
    await _send(connection, bytes([Answer.WELCOME]) + proof(secret, b"server", purpose, nonces))
    return service


async def _send(connection: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, frame(data))


async def _receive(connection: socket.socket) -> bytes:
    """Return a frame of the handshake without reading past it."""
    return await receive_frame_on_loop(connection, HANDSHAKE_FRAME_BYTES)


async def as_stream(connection: socket.socket, service: Service) -> None:
    """Have ``service`` serve a connection to its end."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=BUFFER_BYTES, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection)
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    try:
        await service(reader, writer)
        writer.close()
        await writer.wait_closed()
    finally:
        transport.abort()


def _run(loop: asyncio.AbstractEventLoop, front: _Front) -> None:
    """The thread: accept until stopped, then end what is in progress."""
    asyncio.set_event_loop(loop)
    accepting = loop.create_task(front.accept())
    try:
        loop.run_forever()
        accepting.cancel()
        loop.run_until_complete(_end_all())
    finally:
        front.listener.close()
        loop.close()


async def _end_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CLOSE_SECONDS)
    # Transports that were aborted close their sockets in the next turns of the loop.
    for _ in range(3):
        await asyncio.sleep(0)


def _close(loop: asyncio.AbstractEventLoop, front: _Front, thread: threading.Thread, process: int) -> None:
    if process != os.getpid():
        return  # A forked child has neither the thread nor the sockets, and shares the loop's wake-up pipe.
    if thread.ident is None:
        front.listener.close()
        loop.close()
        return
    with contextlib.suppress(RuntimeError):  # The loop is closed already.
        loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join()
