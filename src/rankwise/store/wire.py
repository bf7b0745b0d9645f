# SPDX-License-Identifier: Apache-2.0
"""Frames over TCP, and the handshake in which two processes prove to each other that they hold the same secret.

Unpickles nothing and never sends the secret. Data after the handshake is neither signed nor encrypted.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
import weakref
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

from rankwise.errors import ConfigurationError, NotRankwise, SecretRefused

if TYPE_CHECKING:
    from asyncio import StreamReader
    from collections.abc import Callable, Mapping, Sequence

PROTOCOL = b"rankwise-wire/01"
NONCE_BYTES = 32
LONGEST_PURPOSE_BYTES = 64
HANDSHAKE_FRAME_BYTES = len(PROTOCOL) + NONCE_BYTES + LONGEST_PURPOSE_BYTES
"""The longest frame before authentication."""
NUMBER = struct.Struct(">I")
"""The header of a frame: its length."""
LONGEST_FRAME_BYTES = 2**32 - 1
"""The largest length that the header can hold."""
JOINED_BYTES = 2**16
"""Buffers up to this size are sent together: each on its own would be a packet."""
MOST_QUEUED = 4096
"""How many connections the system queues until they are accepted, if it allows so many."""
ATTEMPT_SECONDS = 10.0
"""How long one attempt to connect lasts: the kernel's own pauses between attempts grow too long."""
SILENCE_SECONDS = 30.0
"""After how long a server that sends nothing is not taken for rankwise's; it may just be slow."""
SILENCE_POLL_SECONDS = 1.0
"""How often a caller that follows the silence of a server is called."""
GREETING_SECONDS = 2.0
"""How long a server may take to greet when only probed for being rankwise's."""
ENDING_SECONDS = 10.0
"""For how long a server may close each connection at once: proxies do while their backend starts."""
FIRST_PAUSE_SECONDS = 0.01
LONGEST_PAUSE_SECONDS = 0.5
KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))
UNANSWERED_MILLISECONDS = 90_000
"""How long data may stay unacknowledged before the connection counts as broken."""

Role = Literal[b"client", b"server"]


class FrameTooLong(ConnectionError):
    """The announced length of a frame exceeds the limit."""


class Answer(IntEnum):
    """The server's answer to a client's proof, in one byte; its own proof follows ``WELCOME``."""

    WELCOME = 0
    REFUSED = 1
    UNKNOWN_PURPOSE = 2


# -- frames --------------------------------------------------------------------------------------------


def frame(data: bytes) -> bytes:
    """Return ``data`` prefixed with its length."""
    return NUMBER.pack(len(data)) + data


def json_frame(head: Mapping[str, object]) -> bytes:
    """Return a JSON header as a frame."""
    return frame(json.dumps(head).encode())


def as_sent(head: bytes, buffers: Sequence[memoryview]) -> list[bytes | memoryview]:
    """Return a message as it goes out, one piece after the other: small buffers together with the head."""
    if sum(buffer.nbytes for buffer in buffers) <= JOINED_BYTES:
        return [b"".join([head, *buffers])]
    return [head, *(buffer for buffer in buffers if buffer.nbytes)]


def send_frame(sock: socket.socket, data: bytes) -> None:
    """Send ``data`` with its length before it."""
    sock.sendall(frame(data))


def receive_frame(sock: socket.socket, limit: int = LONGEST_FRAME_BYTES) -> bytes:
    """Return the next frame of at most ``limit`` bytes.

    Raises:
        FrameTooLong: a longer one was announced; the connection can no longer be used.
        ConnectionError: the connection ended.
        TimeoutError: the socket's own limit passed.
    """
    head = bytearray(NUMBER.size)
    fill(sock, memoryview(head))
    data = bytearray(checked_length(head, limit))
    fill(sock, memoryview(data))
    return bytes(data)


def checked_length(head: bytes | bytearray, limit: int) -> int:
    """Return the length in the header of a frame, if it is within ``limit``.

    Raises:
        FrameTooLong: it is not.
    """
    (length,) = NUMBER.unpack(head)
    if length > limit:
        raise FrameTooLong(f"a frame of {length} bytes was announced; the limit is {limit} bytes")
    return int(length)


def fill(sock: socket.socket, memory: memoryview) -> None:
    """Read as many bytes as ``memory`` takes.

    Raises:
        ConnectionError: the connection ended before.
        TimeoutError: the socket's own limit passed.
    """
    done = 0
    while done < memory.nbytes:
        count = sock.recv_into(memory[done:])
        if not count:
            raise ConnectionError("the other side ended the connection")
        done += count


async def receive_frame_on_loop(sock: socket.socket, limit: int = LONGEST_FRAME_BYTES) -> bytes:
    """Return the next frame of at most ``limit`` bytes, without reading past it. Raises as the plain one does."""
    head = bytearray(NUMBER.size)
    await fill_on_loop(sock, memoryview(head))
    data = bytearray(checked_length(head, limit))
    await fill_on_loop(sock, memoryview(data))
    return bytes(data)


async def fill_on_loop(sock: socket.socket, memory: memoryview) -> None:
    """Read as many bytes as ``memory`` holds.

    Raises:
        ConnectionError: the connection ended before.
    """
    loop, done = asyncio.get_running_loop(), 0
    while done < memory.nbytes:
        count = await loop.sock_recv_into(sock, memory[done:])
        if not count:
            raise ConnectionError("the other side ended the connection")
        done += count


async def read_frame(reader: StreamReader, limit: int = LONGEST_FRAME_BYTES) -> bytes:
    """Return the next frame of at most ``limit`` bytes. Raises as :func:`receive_frame` does."""
    try:
        return await reader.readexactly(checked_length(await reader.readexactly(NUMBER.size), limit))
    except EOFError:
        raise ConnectionError("the other side ended the connection") from None


def pack_fields(fields: Sequence[bytes]) -> bytes:
    """Return fields as one byte string, each prefixed with its length: no two lists give the same."""
    return b"".join(map(frame, fields))


def unpack_fields(data: bytes) -> list[bytes]:
    """Return what :func:`pack_fields` was given.

    Raises:
        ValueError: the lengths do not fit the data.
    """
    fields: list[bytes] = []
    position = 0
    while position < len(data):
        start = position + NUMBER.size
        if start > len(data):
            raise ValueError("a field's length is truncated")
        position = start + NUMBER.unpack_from(data, position)[0]
        if position > len(data):
            raise ValueError("a field is truncated")
        fields.append(data[start:position])
    return fields


# -- the handshake, as values --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Nonces:
    """The two nonces of one handshake."""

    client: bytes
    server: bytes


def new_nonce() -> bytes:
    """Return a nonce for one handshake."""
    return secrets.token_bytes(NONCE_BYTES)


def hello(nonce: bytes, purpose: str = "") -> bytes:
    """Return the first frame of either side; only the client's names a purpose."""
    return PROTOCOL + nonce + purpose.encode()


def parse_hello(frame: bytes) -> tuple[bytes, str]:
    """Return the nonce and the purpose of a first frame.

    Raises:
        ValueError: it is not a first frame.
    """
    end = len(PROTOCOL) + NONCE_BYTES
    if len(frame) < end or not frame.startswith(PROTOCOL):
        raise ValueError("not a rankwise greeting")
    return frame[len(PROTOCOL) : end], frame[end:].decode()


def proof(secret: bytes, role: Role, purpose: str, nonces: Nonces) -> bytes:
    """Return the proof that only a holder of ``secret`` can compute, for this role, purpose and handshake.

    Source: HMAC-SHA256 (RFC 2104).
    """
    signed = pack_fields([PROTOCOL, role, purpose.encode(), nonces.client, nonces.server])
    return hmac.digest(secret, signed, hashlib.sha256().name)


def is_proof(given: bytes, secret: bytes, role: Role, purpose: str, nonces: Nonces) -> bool:
    """Whether ``given`` is that proof, compared in constant time."""
    return hmac.compare_digest(given, proof(secret, role, purpose, nonces))


def checked_secret(secret: bytes) -> bytes:
    """Return ``secret`` unless it is empty.

    Raises:
        ConfigurationError: it is.
    """
    if not secret:
        raise ConfigurationError(
            "The job's secret is empty.", do="set RANKWISE_SECRET to a long random text, or unset it"
        )
    return secret


# -- the client's side ---------------------------------------------------------------------------------


class _Dropped(Exception):
    """The server closed the connection before it answered."""

    def __init__(self, *, greeted: bool) -> None:
        super().__init__("the connection was accepted and closed again")
        self.greeted = greeted


def open_connection(
    host: str,
    port: int,
    secret: bytes,
    purpose: str,
    timeout_seconds: float,
    *,
    while_silent: Callable[[], None] | None = None,
) -> socket.socket:
    """Return an authenticated connection, waiting until ``host:port`` is served.

    Args:
        host: name or address of the server's machine.
        port: where it listens.
        secret: of the job, the same as the server's. It is never sent.
        purpose: what the connection is for; it chooses the server's service, and is part of what is signed.
        timeout_seconds: until when to try again while nothing listens, the network cannot be reached, or the
            server is flooded.
        while_silent: called every second while something has accepted the connection but has sent nothing. It may
            raise, which takes the place of the time limit.

    Returns:
        A blocking socket without a timeout, positioned right after the handshake.

    Raises:
        SecretRefused: the server holds another secret.
        NotRankwise: what listens there uses another protocol.
        TimeoutError: nothing answered in time; it includes the system's last error.
    """
    checked_secret(secret)
    deadline = time.monotonic() + timeout_seconds
    pause = FIRST_PAUSE_SECONDS
    ending_since: float | None = None
    last: Exception | None = None
    try:
        while True:
            left = max(deadline - time.monotonic(), FIRST_PAUSE_SECONDS)
            try:
                return _connected((host, port), secret, purpose, left, while_silent)
            except _Dropped as dropped:
                last = dropped
                now = time.monotonic()
                ending_since = None if dropped.greeted else ending_since or now
                if ending_since is not None and now - ending_since > ENDING_SECONDS:
                    raise _not_rankwise(host, port, "it closes every connection without sending anything") from None
            except OSError as error:
                last = error
                ending_since = None
            if time.monotonic() + pause > deadline:
                message = f"nothing answered at {host}:{port} within {timeout_seconds:.0f} s: {last}"
                raise TimeoutError(message) from last
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)
    finally:
        # Its traceback refers to this frame, and so to the frames of all callers.
        last = None


def _connected(
    address: tuple[str, int],
    secret: bytes,
    purpose: str,
    limit_seconds: float,
    while_silent: Callable[[], None] | None,
) -> socket.socket:
    sock = socket.create_connection(address, min(limit_seconds, ATTEMPT_SECONDS))
    try:
        prepare(sock)
        sock.settimeout(min(limit_seconds, SILENCE_SECONDS))
        nonce = new_nonce()
        nonces = Nonces(client=nonce, server=_exchange_hellos(sock, nonce, purpose, address, while_silent))
        _prove(sock, secret, purpose, nonces, address)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


def greets(host: str, port: int) -> bool:
    """Return whether what listens at ``host:port`` sends a rankwise greeting first."""
    try:
        with socket.create_connection((host, port), GREETING_SECONDS) as sock:
            parse_hello(receive_frame(sock, HANDSHAKE_FRAME_BYTES))
    except (OSError, ValueError):
        return False
    return True


def _exchange_hellos(
    sock: socket.socket,
    nonce: bytes,
    purpose: str,
    address: tuple[str, int],
    while_silent: Callable[[], None] | None,
) -> bytes:
    try:
        send_frame(sock, hello(nonce, purpose))
        while while_silent is not None and not select.select([sock], [], [], SILENCE_POLL_SECONDS)[0]:
            while_silent()
        return parse_hello(receive_frame(sock, HANDSHAKE_FRAME_BYTES))[0]
    except (FrameTooLong, ValueError):
        raise _not_rankwise(*address, "its greeting is not that of this version of rankwise") from None
    except TimeoutError:
        if (sock.gettimeout() or 0.0) < SILENCE_SECONDS:
            raise
        raise _not_rankwise(*address, f"it sent nothing for {SILENCE_SECONDS:.0f} s") from None
    except ConnectionError:
        raise _Dropped(greeted=False) from None


def _prove(sock: socket.socket, secret: bytes, purpose: str, nonces: Nonces, address: tuple[str, int]) -> None:
    """Prove to the server that this process holds the secret, and check its proof."""
    try:
        send_frame(sock, proof(secret, b"client", purpose, nonces))
        frame = receive_frame(sock, HANDSHAKE_FRAME_BYTES)
    except FrameTooLong:
        raise _not_rankwise(*address, "its answer is not a rankwise answer") from None
    except ConnectionError:
        raise _Dropped(greeted=True) from None
    host, port = address
    if frame[:1] == bytes([Answer.UNKNOWN_PURPOSE]):
        raise NotRankwise(
            f"The server at {host}:{port} is a rankwise server, but does not serve {purpose!r}.",
            do="give the address of the job's own server",
        )
    if frame[:1] != bytes([Answer.WELCOME]) or not is_proof(frame[1:], secret, b"server", purpose, nonces):
        raise SecretRefused(
            f"The server at {host}:{port} and this process do not hold the same secret.",
            do="set the same RANKWISE_SECRET for every process on all machines, or copy the file "
            "~/.config/rankwise/secret from one machine to the others",
        )


def _not_rankwise(host: str, port: int, why: str) -> NotRankwise:
    return NotRankwise(
        f"The program that listens at {host}:{port} does not use rankwise's protocol: {why}.",
        do="set RANKWISE_SECRET for every process or for none, with one version of rankwise; "
        f"otherwise use another port. To see what listens: ss -ltnp 'sport = :{port}' on {host}",
    )


# -- sockets -------------------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on one address; port 0 takes a free one.

    Raises:
        ConfigurationError: the address or port cannot be bound.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(MOST_QUEUED)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"The job's store cannot be served on {host}:{port}: {error.strerror}.",
            do="use another port (MASTER_PORT or init_method), or end the process that uses this one: "
            f"ss -ltnp 'sport = :{port}'",
        ) from error
    return listener


def prepare(sock: socket.socket) -> None:
    """Have a connection send at once, notice the loss of a peer's machine, and not stay open in forked children."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_MILLISECONDS)
    close_in_children(sock)


_of_this_process: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(sock: socket.socket) -> None:
    """Have processes forked from this one close their copy of ``sock``.

    A loader's worker that outlives its rank would otherwise keep the rank's connections open, and its exit would
    go unnoticed.
    """
    _of_this_process.add(sock)


def _close_all() -> None:
    for sock in list(_of_this_process):
        # An event loop's copy of the object must not close the file descriptor again once it is reused.
        descriptor = sock.detach()
        if descriptor >= 0:
            os.close(descriptor)
    _of_this_process.clear()


os.register_at_fork(after_in_child=_close_all)
