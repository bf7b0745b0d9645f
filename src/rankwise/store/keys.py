# SPDX-License-Identifier: Apache-2.0
"""The keys and values of a job, and the service that lets authenticated connections use them.

Everything runs on one event loop and needs no lock. Waits for a key cost nothing until it is set. The launcher
serves its own store with it.
"""

from __future__ import annotations

import asyncio
import struct
from enum import IntEnum
from typing import TYPE_CHECKING

from rankwise.store.wire import pack_fields, read_frame, unpack_fields, write_frame

if TYPE_CHECKING:
    from collections.abc import Sequence

PURPOSE = "store"
LARGEST_FRAME_BYTES = 256 * 2**20
"""The largest request or answer; the store is for small values."""
SECONDS = struct.Struct(">d")
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


class Keys:
    """A mapping from text to bytes in which a key can be waited for."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._given_up: dict[str, tuple[int, str]] = {}

    def set(self, key: str, value: bytes) -> None:
        """Set ``key`` and wake the connections that wait for it."""
        self._values[key] = value
        for waiter in self._waiting.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    def give_up(self, prefix: str, rank: int, why: str) -> None:
        """End every wait for a key that starts with ``prefix``, now and later; keys that are set can still be read."""
        self._given_up.setdefault(prefix, (rank, why))
        for key in [key for key in self._waiting if key.startswith(prefix)]:
            for waiter in self._waiting.pop(key):
                if not waiter.done():
                    waiter.set_result(None)

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

    async def wait(self, keys: Sequence[str], seconds: float) -> None:
        """Wait until every key is set.

        Raises:
            TimeoutError: some were not set within ``seconds``.
            GivenUp: some will never be set.
        """
        async with asyncio.timeout(_bounded(seconds)):
            while missing := [key for key in keys if key not in self._values]:
                for prefix, reason in self._given_up.items():
                    if any(key.startswith(prefix) for key in missing):
                        raise GivenUp(*reason)
                await self._set_next(missing[0])

    async def _set_next(self, key: str) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(waiter)
        try:
            await waiter
        finally:
            waiters = self._waiting.get(key)
            if waiters is not None:
                waiters.discard(waiter)
                if not waiters:
                    del self._waiting[key]

    async def get(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        """Return the values of keys, waiting until all are set. Raises as :meth:`wait` does."""
        if not self.check(keys):
            await self.wait(keys, seconds)
        return [self._values[key] for key in keys]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after the other, until it ends."""
        while True:
            request = await read_frame(reader, LARGEST_FRAME_BYTES)
            try:
                answer = [bytes([Reply.DONE]), *await self._answer(unpack_fields(request), reader)]
            except TimeoutError:
                answer = [bytes([Reply.TIMEOUT])]
            except GivenUp as error:
                answer = [bytes([Reply.GIVEN_UP]), str(error).encode(), str(error.rank).encode()]
            except (ValueError, IndexError, struct.error) as error:
                # Includes bytes that are not text. The mistake is in this call only.
                answer = [bytes([Reply.BAD_REQUEST]), str(error).encode(errors="replace")]
            await write_frame(writer, pack_fields(answer))

    async def _answer(  # noqa: C901 - one case per request
        self, fields: list[bytes], reader: asyncio.StreamReader
    ) -> list[bytes]:
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
            case b"delete", [key]:
                return [str(int(self.delete(key.decode()))).encode()]
            case b"num_keys", []:
                return [str(self.num_keys()).encode()]
            case b"get", [seconds, *keys]:
                return await self._get(_texts(keys), SECONDS.unpack(seconds)[0], reader)
            case b"wait", [seconds, *keys]:
                await self._get(_texts(keys), SECONDS.unpack(seconds)[0], reader)
            case _:
                raise ValueError(f"{word[:40]!r} with {len(rest)} arguments is not a store request")
        return []

    async def _get(self, keys: list[str], seconds: float, reader: asyncio.StreamReader) -> list[bytes]:
        """Return the values of keys; give up when the connection that asks for them ends."""
        if self.check(keys):
            return [self._values[key] for key in keys]
        waiting = asyncio.ensure_future(self.get(keys, seconds))
        # A waiting client sends nothing: a byte that arrives now, or an end of file, ends the connection.
        ending = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({waiting, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise ConnectionError("the connection closed while it was waiting")
            return waiting.result()
        finally:
            waiting.cancel()
            ending.cancel()
            await asyncio.gather(waiting, ending, return_exceptions=True)


def _bounded(seconds: float) -> float:
    """Return a limit that the event loop accepts; NaN means no limit."""
    return min(seconds, LONGEST_WAIT_SECONDS) if seconds > 0 else 0.0


def _texts(fields: Sequence[bytes]) -> list[str]:
    return [field.decode() for field in fields]
