# SPDX-License-Identifier: Apache-2.0
"""The keys and values of a job, and the service that lets authenticated connections use them.

Everything runs on one event loop and needs no lock. Waits for a key cost nothing until it is set. The launcher
serves its own store with it.
"""

from __future__ import annotations

import asyncio
import struct
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, cast

from rankwise.errors import bytes_text
from rankwise.store.wire import NUMBER, checked_length, frame, pack_fields, unpack_fields

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

PURPOSE = "store/2"
"""With the version of the requests, so that another version of rankwise is refused."""
LARGEST_FRAME_BYTES = 256 * 2**20
"""The largest request or answer; the store is for small values."""
SECONDS = struct.Struct(">d")
REQUEST = struct.Struct(">Q")
"""The number of a request, which its answer repeats."""
LARGEST_NUMBER = 2**63 - 1
LONGEST_WAIT_SECONDS = 10.0**9


class Reply(IntEnum):
    """The first byte of every answer."""

    DONE = 0
    TIMEOUT = 1
    BAD_REQUEST = 2
    GIVEN_UP = 3


class GivenUp(Exception):
    """A key that is waited for will not be set, because of a rank; holds the reason."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(why)
        self.rank = rank


class _Wait:
    """A wait for keys: which of them are not set yet, and what to call once all are, or one never will be."""

    __slots__ = ("done", "keys", "missing")

    def __init__(self, keys: Sequence[str], done: Callable[[GivenUp | None], None]) -> None:
        self.keys = keys
        self.missing: set[str] = set()
        self.done = done


class Keys:
    """A mapping from text to bytes in which a key can be waited for.

    A wait for many keys costs as much as there are keys, whatever the order in which they are set.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, dict[_Wait, None]] = {}
        self._given_up: dict[str, tuple[int, str]] = {}

    def set(self, key: str, value: bytes) -> None:
        """Set ``key`` and wake the connections that wait for it."""
        self._values[key] = value
        for wait in self._waiting.pop(key, ()):
            wait.missing.discard(key)
            if not wait.missing:
                self._continue(wait)

    def give_up(self, prefix: str, rank: int, why: str) -> None:
        """End every wait for a key that starts with ``prefix``, now and later; keys that are set can still be read."""
        self._given_up.setdefault(prefix, (rank, why))
        waits = [wait for key, waits in self._waiting.items() if key.startswith(prefix) for wait in waits]
        for wait in dict.fromkeys(waits):
            self.end_wait(wait)
            wait.done(GivenUp(rank, why))

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Set ``key`` if it holds ``expected``, or is absent and ``expected`` is empty; return what it then holds.

        Source: torch.distributed.TCPStore.compare_set, which answers ``expected`` for an absent key.
        """
        held = self._values.get(key)
        if held == expected or (held is None and not expected):
            self.set(key, value)
            return value
        return expected if held is None else held

    def append(self, key: str, value: bytes) -> None:
        """Append ``value`` to what ``key`` holds, empty at first."""
        self.set(key, self._values.get(key, b"") + value)

    def add(self, key: str, number: int) -> int:
        """Add to the counter ``key``, 0 at first, and return the sum.

        Raises:
            ValueError: the key does not hold a number, or the sum is too large; the key is unchanged.
        """
        held = self._values.get(key, b"0")
        try:
            total = int(held) + number
        except ValueError:
            raise ValueError(f"{key} holds {held[:40]!r}, which is not a number") from None
        if abs(total) > LARGEST_NUMBER:
            raise ValueError(f"{key} would hold {total}, which does not fit in 64 bits")
        self.set(key, str(total).encode())
        return total

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether every key is set."""
        return all(key in self._values for key in keys)

    def peek(self, key: str) -> bytes | None:
        """Return what ``key`` holds now, or ``None``."""
        return self._values.get(key)

    def delete(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        return self._values.pop(key, None) is not None

    def delete_prefix(self, prefix: str) -> int:
        """Remove every key that starts with ``prefix``; return how many there were."""
        gone = [key for key in self._values if key.startswith(prefix)]
        for key in gone:
            del self._values[key]
        self._given_up = {given: why for given, why in self._given_up.items() if not given.startswith(prefix)}
        return len(gone)

    def num_keys(self) -> int:
        """Return how many keys are set."""
        return len(self._values)

    def begin_wait(self, keys: Sequence[str], done: Callable[[GivenUp | None], None]) -> _Wait | None:
        """Call ``done`` once every key is set, or one never will be; ``None`` if all are set already.

        Raises:
            GivenUp: some will never be set.
        """
        wait = _Wait(keys, done)
        return wait if self._register(wait) else None

    def end_wait(self, wait: _Wait) -> None:
        """Forget a wait."""
        for key in wait.missing:
            waits = self._waiting.get(key)
            if waits is not None:
                waits.pop(wait, None)
                if not waits:
                    del self._waiting[key]
        wait.missing.clear()

    def _register(self, wait: _Wait) -> bool:
        """Wait for those keys that are not set; return whether there are any."""
        missing = [key for key in wait.keys if key not in self._values]
        for prefix, reason in self._given_up.items():
            if any(key.startswith(prefix) for key in missing):
                raise GivenUp(*reason)
        wait.missing.update(missing)
        for key in wait.missing:
            self._waiting.setdefault(key, {})[wait] = None
        return bool(missing)

    def _continue(self, wait: _Wait) -> None:
        """End a wait whose keys have all been set, unless some were deleted meanwhile."""
        try:
            if not self._register(wait):
                wait.done(None)
        except GivenUp as error:
            wait.done(error)

    async def wait(self, keys: Sequence[str], seconds: float) -> None:
        """Wait until every key is set.

        Raises:
            TimeoutError: some were not set within ``seconds``.
            GivenUp: some will never be set.
        """
        ended: asyncio.Future[GivenUp | None] = asyncio.get_running_loop().create_future()
        wait = self.begin_wait(keys, lambda error: None if ended.done() else ended.set_result(error))
        if wait is None:
            return
        try:
            async with asyncio.timeout(_bounded(seconds)):
                error = await ended
        finally:
            self.end_wait(wait)
        if error is not None:
            raise error

    async def serve(self, connection: socket.socket) -> None:
        """Answer the requests of one connection until it ends."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        transport, _ = await loop.connect_accepted_socket(partial(_Client, self, ended), connection)
        try:
            await ended
        finally:
            transport.abort()

    def answer(self, fields: list[bytes]) -> list[bytes]:  # noqa: C901 - one case per request
        """Answer a request that does not wait.

        Raises:
            ValueError: there is no such request, or a value is of the wrong kind.
        """
        word, *rest = fields
        match word, rest:
            case b"set", [key, value]:
                self.set(key.decode(), value)
            case b"multi_set", [*pairs]:
                for key, value in zip(pairs[::2], pairs[1::2], strict=True):
                    self.set(key.decode(), value)
            case b"compare_set", [key, expected, value]:
                return [self.compare_set(key.decode(), expected, value)]
            case b"append", [key, value]:
                self.append(key.decode(), value)
            case b"add", [key, number]:
                return [str(self.add(key.decode(), int(number))).encode()]
            case b"check", [*keys]:
                return [str(int(self.check(_texts(keys)))).encode()]
            case b"peek", [*keys]:
                # Of those that are set: the number of the key in the request, and its value.
                found = [(number, self._values.get(key.decode())) for number, key in enumerate(keys)]
                return [part for number, value in found if value is not None for part in (b"%d" % number, value)]
            case b"delete", [key]:
                return [str(int(self.delete(key.decode()))).encode()]
            case b"num_keys", []:
                return [str(self.num_keys()).encode()]
            case _:
                raise ValueError(f"{word[:40]!r} with {len(rest)} arguments is not a store request")
        return []

    def values(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that are set."""
        return [self._values[key] for key in keys]


class _Client(asyncio.Protocol):
    """One connection: answers its requests. Requests that wait do not hold up others.

    A request is a frame: a number of the client's, which the answer repeats, and fields.
    """

    def __init__(self, keys: Keys, ended: asyncio.Future[None]) -> None:
        self._keys = keys
        self._ended = ended
        self._loop = ended.get_loop()
        self._transport: asyncio.Transport | None = None
        self._arrived = bytearray()
        self._waits: dict[bytes, tuple[_Wait, asyncio.TimerHandle]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        for number in list(self._waits):
            self._end(number)
        if not self._ended.done():
            self._ended.set_result(None)

    # A client that does not read its answers is not asked for more requests.

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._arrived += data
        start = 0
        try:
            while (body := start + NUMBER.size) <= len(self._arrived):
                end = body + checked_length(self._arrived[start:body], LARGEST_FRAME_BYTES)
                if end > len(self._arrived):
                    break
                request = bytes(memoryview(self._arrived)[body:end])
                self._handle(request[: REQUEST.size], request[REQUEST.size :])
                start = end
        except ConnectionError:
            if self._transport is not None:
                self._transport.abort()
            return
        if start:
            del self._arrived[:start]

    def _handle(self, number: bytes, request: bytes) -> None:
        try:
            word, *rest = fields = unpack_fields(request)
            if word in {b"get", b"wait"}:
                seconds, *keys = rest
                self._begin(number, word, _texts(keys), SECONDS.unpack(seconds)[0])
            elif word == b"cancel":
                if rest[0] in self._waits:
                    self._end(rest[0])
                    self._reply(rest[0], Reply.TIMEOUT)
            else:
                self._reply(number, Reply.DONE, self._keys.answer(fields))
        except (ValueError, IndexError, struct.error) as error:
            # Includes bytes that are not text. The mistake is in this call only.
            self._reply(number, Reply.BAD_REQUEST, [str(error).encode(errors="replace")])

    def _begin(self, number: bytes, word: bytes, keys: list[str], seconds: float) -> None:
        """Answer once every key is set."""

        def done(error: GivenUp | None) -> None:
            self._end(number)
            if error is not None:
                self._reply(number, Reply.GIVEN_UP, [str(error).encode(), str(error.rank).encode()])
            else:
                self._reply(number, Reply.DONE, self._keys.values(keys) if word == b"get" else [])

        def is_late() -> None:
            self._end(number)
            self._reply(number, Reply.TIMEOUT)

        try:
            wait = self._keys.begin_wait(keys, done)
        except GivenUp as error:
            done(error)
            return
        if wait is None:
            done(None)
        else:
            self._waits[number] = wait, self._loop.call_later(_bounded(seconds), is_late)

    def _end(self, number: bytes) -> None:
        waiting = self._waits.pop(number, None)
        if waiting is not None:
            wait, timer = waiting
            timer.cancel()
            self._keys.end_wait(wait)

    def _reply(self, number: bytes, reply: Reply, values: Sequence[bytes] = ()) -> None:
        if self._transport is None:
            return
        answer = number + pack_fields([bytes([reply]), *values])
        if len(answer) > LARGEST_FRAME_BYTES:
            why = f"the answer has {bytes_text(len(answer))}; the limit is {bytes_text(LARGEST_FRAME_BYTES)}"
            answer = number + pack_fields([bytes([Reply.BAD_REQUEST]), why.encode()])
        self._transport.write(frame(answer))


def _bounded(seconds: float) -> float:
    """Return a limit that the event loop accepts; 0 for NaN."""
    return min(seconds, LONGEST_WAIT_SECONDS) if seconds > 0 else 0.0


def _texts(fields: Sequence[bytes]) -> list[str]:
    return [field.decode() for field in fields]
