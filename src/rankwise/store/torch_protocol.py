# SPDX-License-Identifier: Apache-2.0
"""A store that torch's own client can use, and only processes of this user on this machine can reach.

Torch's own server accepts every process that reaches its port. This one asks the kernel which user owns the other end
of a connection, and closes a stranger's before it has read a byte.

Source: torch/csrc/distributed/c10d/TCPStore.cpp. A request is one byte and its arguments, a text or a value is a length
and bytes; numbers are 64-bit integers in the machine's byte order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING

from rankwise.store.keys import LARGEST_FRAME_BYTES, LONGEST_WAIT_SECONDS, Keys
from rankwise.store.server import SocketServer, as_stream
from rankwise.store.wire import listen
from rankwise.world.network import user_of_peer

if TYPE_CHECKING:
    import socket
    from asyncio import StreamReader, StreamWriter

    from rankwise.store.server import SocketService

MAGIC = 0x3C85F7CE
"""Sent by a client that uses this protocol."""
_INT = struct.Struct("=q")
_SHORT = struct.Struct("=I")


class Query(IntEnum):
    """The first byte of a request."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    NUM_KEYS = 7
    DELETE = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13


READY, NOT_READY = b"\0", b"\1"
"""Answers to ``CHECK``."""
STOP_WAITING, WAIT_CANCELED = b"\0", b"\1"
"""Answers to ``WAIT`` and to ``CANCEL_WAIT``."""


def serve_this_user(host: str) -> SocketServer:
    """Serve a new, empty store on a free port of one loopback address, to processes of this user; return the server."""
    service = partial(as_stream, service=partial(_handle, Keys()))

    async def admit(connection: socket.socket) -> SocketService | None:
        return service if user_of_peer(connection) == os.geteuid() else None

    server = SocketServer(listen(host, 0), admit)
    server.start()
    return server


async def _handle(keys: Keys, reader: StreamReader, writer: StreamWriter) -> None:
    """Answer the requests of one connection until it ends, or makes one that torch's server would not answer."""
    waits: set[asyncio.Task[None]] = set()
    try:
        while True:
            query = Query((await reader.readexactly(1))[0])
            if query is Query.WAIT:
                # The client may cancel it, and sends nothing else meanwhile.
                waits = {asyncio.create_task(_wait(keys, await _texts(reader), writer))}
            else:
                if query is Query.CANCEL_WAIT:
                    _cancel(waits)
                writer.write(await _answer(keys, query, reader))
                await writer.drain()
    except (EOFError, ValueError):
        return
    finally:
        _cancel(waits)


async def _answer(keys: Keys, query: Query, reader: StreamReader) -> bytes:  # noqa: C901, PLR0912 - one case per request
    match query:
        case Query.VALIDATE:
            if await reader.readexactly(_SHORT.size) != _SHORT.pack(MAGIC):
                raise ValueError("this is not a client of torch's store")
        case Query.PING:
            return await reader.readexactly(_SHORT.size)
        case Query.SET:
            keys.set(await _text(reader), await _value(reader))
        case Query.APPEND:
            keys.append(await _text(reader), await _value(reader))
        case Query.MULTI_SET:
            for _ in range(await _int(reader)):
                keys.set(await _text(reader), await _value(reader))
        case Query.COMPARE_SET:
            return _packed(keys.compare_set(await _text(reader), await _value(reader), await _value(reader)))
        case Query.GET:
            return _packed(_held(keys, await _text(reader)))
        case Query.MULTI_GET:
            return b"".join(_packed(_held(keys, key)) for key in await _texts(reader))
        case Query.ADD:
            return _INT.pack(keys.add(await _text(reader), await _int(reader)))
        case Query.CHECK:
            return READY if keys.check(await _texts(reader)) else NOT_READY
        case Query.NUM_KEYS:
            return _INT.pack(keys.num_keys())
        case Query.DELETE:
            return _INT.pack(keys.delete(await _text(reader)))
        case Query.CANCEL_WAIT:
            return WAIT_CANCELED
        case Query.WAIT:
            pass
    return b""


async def _wait(keys: Keys, names: list[str], writer: StreamWriter) -> None:
    with contextlib.suppress(OSError):
        await keys.wait(names, LONGEST_WAIT_SECONDS)
        writer.write(STOP_WAITING)


def _cancel(waits: set[asyncio.Task[None]]) -> None:
    for wait in waits:
        wait.cancel()


def _held(keys: Keys, name: str) -> bytes:
    value = keys.peek(name)
    if value is None:
        raise ValueError(f"{name} is not set")  # A client waits for it first.
    return value


def _packed(value: bytes) -> bytes:
    return _INT.pack(len(value)) + value


async def _int(reader: StreamReader) -> int:
    return int(_INT.unpack(await reader.readexactly(_INT.size))[0])


async def _value(reader: StreamReader) -> bytes:
    length = await _int(reader)
    if not 0 <= length <= LARGEST_FRAME_BYTES:
        raise ValueError(f"a value of {length} bytes was announced")
    return await reader.readexactly(length)


async def _text(reader: StreamReader) -> str:
    return (await _value(reader)).decode(errors="surrogateescape")


async def _texts(reader: StreamReader) -> list[str]:
    return [await _text(reader) for _ in range(await _int(reader))]
