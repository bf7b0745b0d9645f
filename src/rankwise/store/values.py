# SPDX-License-Identifier: Apache-2.0
"""The store as ranks use it: text keys, bytes values and Python's own errors, whatever the transport.

Opens nothing. A Store is one connection, used by one thread at a time; ``clone()`` gives another thread
its own.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from rankwise.store.client import StoreConnection

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence


_ABSENT = "rankwise: this key is not set"


class StoreLost(ConnectionError):
    """The process that serves the store has exited, or does not answer."""


class Store:
    """One connection to the job's store. Keys are text, values are bytes, nothing is unpickled."""

    def __init__(self, connection: dist.Store, prefix: str = "") -> None:
        """Use an open connection, torch's or rankwise's own.

        ``prefix`` and a ``/`` stand before every key; kept here because torch's own prefixes do not reach clones.
        """
        self._connection = connection
        self._prefix = prefix

    @property
    def torch_store(self) -> dist.Store:
        """The store in the form that torch takes. Keep this object as long as torch may use it."""
        return dist.PrefixStore(self._prefix, self._connection) if self._prefix else self._connection

    def clone(self) -> Store:
        """Return a separate connection to the same store, for another thread."""
        with translated("another connection"):
            connection = self._connection.clone()  # pyright: ignore[reportAttributeAccessIssue] - newer than torch's stub
        return Store(connection, self._prefix)

    def prefixed(self, prefix: str) -> Store:
        """Return the part of the store whose keys start with ``prefix``, over the same connection."""
        return Store(self._connection, self._key(prefix))

    def close(self) -> None:
        """End the connection, and the store if :func:`rankwise.store.opening.serve` returned it with this connection.

        Torch's connections are closed when nothing refers to them.
        """
        if isinstance(self._connection, StoreConnection):
            self._connection.close()

    def expect_answers_within(self, seconds: float) -> None:
        """Treat rankwise's own store as lost if it answers later than this; for torch's, only TCP's limit applies.

        See :meth:`rankwise.store.client.StoreConnection.expect_answers_within`.
        """
        if isinstance(self._connection, StoreConnection):
            self._connection.expect_answers_within(seconds)

    def set(self, key: str, value: bytes | str) -> None:
        """Set ``key``, replacing what it held."""
        with translated(key):
            self._connection.set(self._key(key), value)  # pyright: ignore[reportArgumentType] - it takes bytes too

    def set_if_absent(self, key: str, value: str) -> bool:
        """Set ``key`` unless it is there already, in one step; return whether it was set."""
        return self.held_or_set(key, value) == value.encode()

    def held_or_set(self, key: str, value: str) -> bytes:
        """Return what ``key`` holds, which is ``value`` if it was not set before: in one step."""
        with translated(key):
            return self._connection.compare_set(self._key(key), "", value)

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that are set."""
        with translated(", ".join(keys)):
            return self._connection.multi_get([self._key(key) for key in keys])

    def get(self, key: str, timeout_seconds: float) -> bytes:
        """Return the value of ``key``, waiting for it to be set, and set again if it is deleted meanwhile.

        Raises:
            TimeoutError: it was not set within ``timeout_seconds``.
            StoreLost: the store has exited, or does not answer.
        """
        if isinstance(self._connection, StoreConnection):
            with translated(key):
                return self._connection.get_within([self._key(key)], timeout_seconds)[0]
        deadline = time.monotonic() + timeout_seconds
        while True:
            self.wait([key], max(0.0, deadline - time.monotonic()))
            value = self.peek(key)
            if value is not None:
                return value

    def peek(self, key: str) -> bytes | None:
        """Return the value of ``key`` now, ``None`` if it is not set: in one step.

        Torch's own ``get`` would wait for a key that was deleted after ``check``, for as long as torch's limit.
        """
        with translated(key):
            value = self._connection.compare_set(self._key(key), _ABSENT, _ABSENT)
        return None if value == _ABSENT.encode() else value

    def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        """Wait until every key is set. Raises as :meth:`get` does."""
        with translated(", ".join(keys)):
            self._connection.wait([self._key(key) for key in keys], timedelta(seconds=timeout_seconds))

    def add(self, key: str, number: int) -> int:
        """Add ``number`` to the counter ``key`` (0 at first) and return the sum."""
        with translated(key):
            return self._connection.add(self._key(key), number)

    def check(self, key: str) -> bool:
        """Return whether ``key`` is set."""
        with translated(key):
            return self._connection.check([self._key(key)])

    def delete(self, key: str) -> None:
        """Remove ``key`` if it is there."""
        with translated(key):
            self._connection.delete_key(self._key(key))

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key


@contextmanager
def translated(key: str) -> Generator[None]:
    """Turn torch's store errors inside the block into Python's own."""
    try:
        yield
    except RuntimeError as error:
        if "timeout" in str(error).lower():
            raise TimeoutError(f"{key} was not set in the job's store in time") from error
        raise StoreLost(f"the job's store was lost (at {key}): {str(error).splitlines()[0]}") from error
