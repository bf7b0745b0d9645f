# SPDX-License-Identifier: Apache-2.0
"""The store as ranks use it: text keys, bytes values and Python's own errors, whatever the transport.

``clone()`` gives another thread a Store of its own, over the same connection where the store is rankwise's. Also
a connection to an authenticated store, rankwise's own, as the kind of store that torch's process groups take. Serves
nothing.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rankwise.errors import ConfigurationError, PeerMissing, bytes_text
from rankwise.store.keys import LARGEST_FRAME_BYTES, PURPOSE, REQUEST, SECONDS, Reply
from rankwise.store.shared_socket import CLOSED, CUT, Lost, SharedSocket
from rankwise.store.wire import open_connection, pack_fields, unpack_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rankwise.store.server import AuthenticatedServer

STORE_ANSWER_SECONDS = 300.0
"""How much longer than the requested wait the serving process may take to answer: it may be stopped in a debugger."""
LEAST_STORE_ANSWER_SECONDS = 10.0
"""The least time it is always given: it may just be slow."""
MOST_SHOWN_KEYS = 8
"""How many keys an error names."""
REOPEN_SECONDS = 10.0
"""How long to retry another connection to a store that was reachable before."""


def connect_shared(host: str, port: int, secret: bytes, timeout_seconds: float) -> SharedSocket:
    """Return a connection to an authenticated store, retrying for ``timeout_seconds``.

    Raises as :func:`rankwise.store.wire.open_connection` does.
    """
    connect = partial(open_connection, host, port, secret, PURPOSE)
    # Later it is known that there is a store.
    limits = chain([timeout_seconds], repeat(REOPEN_SECONDS))
    return SharedSocket(lambda: connect(next(limits)))


class StoreConnection(dist.Store):
    """A user of a connection to an authenticated store, which it shares with its clones.

    Raises torch's own errors, so that torch handles them as those of its TCPStore; :class:`Store` translates both.

    Torch's C++ finds these methods as long as this object is referenced from Python; code that passes it to a process
    group must keep it.
    """

    def __init__(
        self,
        shared: SharedSocket,
        server: AuthenticatedServer | None = None,
        *,
        is_clone: bool = False,
        answer_seconds: float = STORE_ANSWER_SECONDS,
    ) -> None:
        """Use an open connection. A ``server`` in this process is kept as long as this object or a clone of it."""
        super().__init__()
        self._shared = shared
        self._server = server
        self._is_clone = is_clone
        self._answer_seconds = answer_seconds
        self._closed = False
        shared.join(self)

    def clone(self) -> StoreConnection:
        """Return another user of the same connection: for another thread, which may wait while this one calls."""
        return StoreConnection(self._shared, self._server, is_clone=True, answer_seconds=self._answer_seconds)

    def expect_answers_within(self, seconds: float) -> None:
        """Treat the store as lost if it answers later than this; also applies to clones made from now on.

        An answer is always given at least ``LEAST_STORE_ANSWER_SECONDS``.
        """
        self._answer_seconds = min(max(seconds, LEAST_STORE_ANSWER_SECONDS), STORE_ANSWER_SECONDS)

    def close(self) -> None:
        """End the connection if no clone is left, and the store if it is served through this one; calls fail then."""
        self._end()
        if self._server is not None and not self._is_clone:
            self._server.close()

    def end_waits(self) -> None:
        """Have the calls of other threads on this object end now as if their time had passed."""
        self._shared.end_waits(self)

    def _end(self) -> None:
        self._closed = True
        self._shared.leave(self)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not hasattr(self, "_shared"):
            return
        if is_finalizing():
            # The globals of this module that _end() needs may already be cleared.
            self._shared.drop()
        else:
            self._end()

    # -- what torch calls, under the names that Python and C++ look up -------------------------------

    def set(self, key: str, value: bytes | str) -> None:
        """Set ``key``."""
        self._ask([b"set", key.encode(), _as_bytes(value)])

    def get(self, key: str) -> bytes:
        """Return the value of ``key``, waiting as long as torch's ``set_timeout`` says."""
        return self.get_within([key], self._own_limit())[0]

    def get_within(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        """Return the values of keys, waiting for ``seconds`` until all are set."""
        return self._ask([b"get", SECONDS.pack(seconds), *(key.encode() for key in keys)], seconds)

    def peek(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the values of those keys that are set."""
        numbers_and_values = self._ask([b"peek", *(key.encode() for key in keys)])
        return {
            keys[int(number)]: value
            for number, value in zip(numbers_and_values[::2], numbers_and_values[1::2], strict=True)
        }

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return when every key is set."""
        seconds = self._own_limit() if timeout is None else timeout.total_seconds()
        self._ask([b"wait", SECONDS.pack(seconds), *(key.encode() for key in keys)], seconds)

    def compare_set(self, key: str, expected: bytes | str, value: bytes | str) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Set ``key`` if it holds ``expected``; return what it then holds."""
        return self._ask([b"compare_set", key.encode(), _as_bytes(expected), _as_bytes(value)])[0]

    def add(self, key: str, number: int) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Add to a counter and return the sum."""
        return int(self._ask([b"add", key.encode(), str(number).encode()])[0])

    def check(self, keys: Sequence[str]) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return whether every key is set."""
        return self._ask([b"check", *(key.encode() for key in keys)])[0] == b"1"

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        return self._ask([b"delete", key.encode()])[0] == b"1"

    def num_keys(self) -> int:
        """Return how many keys are set."""
        return int(self._ask([b"num_keys"])[0])

    def append(self, key: str, value: bytes | str) -> None:
        """Append ``value`` to what ``key`` holds."""
        self._ask([b"append", key.encode(), _as_bytes(value)])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys, waiting as long as torch's ``set_timeout`` says."""
        return self.get_within(keys, self._own_limit())

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Set many keys at once."""
        pairs = [part for key, value in zip(keys, values, strict=True) for part in (key.encode(), _as_bytes(value))]
        self._ask([b"multi_set", *pairs])

    def has_extended_api(self) -> bool:
        """Return that ``append``, ``multi_get`` and ``multi_set`` are available."""
        return True

    # PrefixStore, in C++, looks for these two under C++'s names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _own_limit(self) -> float:
        limit: timedelta = self.timeout  # pyright: ignore[reportAttributeAccessIssue] - not in torch's stub
        return limit.total_seconds()

    # -- asking ------------------------------------------------------------------------------------

    def _ask(self, fields: Sequence[bytes], seconds: float = 0.0) -> list[bytes]:
        request = pack_fields(fields)
        if REQUEST.size + len(request) > LARGEST_FRAME_BYTES:
            raise ConfigurationError(
                f"{bytes_text(len(request))} are too many for one call to the job's store.",
                evidence=f"the limit is {bytes_text(LARGEST_FRAME_BYTES)}",
                do="send large values with all_gather_object() or broadcast(), or through files",
            )
        try:
            if self._closed:
                raise Lost(CLOSED)
            reply = self._shared.ask(self, request, seconds + self._answer_seconds)
            if not reply:
                raise Lost(CUT)
        except ConnectionError as error:
            raise dist.DistNetworkError(str(error)) from error
        code, *answer = unpack_fields(reply)
        if code == bytes([Reply.TIMEOUT]):
            raise dist.DistStoreError(f"wait timeout after {seconds:.3f} s")
        if code == bytes([Reply.GIVEN_UP]):
            raise PeerMissing(
                f"This wait cannot end: {answer[0].decode(errors='replace')}.",
                ranks=[int(answer[1])],
                do="have every rank open the process group before its script can end",
            )
        if code == bytes([Reply.BAD_REQUEST]):
            raise ConfigurationError(
                f"The job's store refused a call: {answer[0].decode(errors='replace')}.",
                do="use one key for counters and another for texts, and read large values in several calls",
            )
        return answer


def _as_bytes(value: bytes | str | Any) -> bytes:  # torch hands over several kinds of bytes
    return value.encode() if isinstance(value, str) else bytes(value)


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

    def end_waits(self) -> bool:
        """Have the calls of other threads on this object end now as if their time had passed; torch's stores cannot.

        Returns:
            Whether they end.
        """
        if not isinstance(self._connection, StoreConnection):
            return False
        self._connection.end_waits()
        return True

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
        with translated(_in_words(keys)):
            if isinstance(self._connection, dist.FileStore):  # has no such call
                return [self._connection.get(self._key(key)) for key in keys]
            return self._connection.multi_get([self._key(key) for key in keys])

    def peek_all(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the values of those keys that are set now: of rankwise's own store in one message."""
        if isinstance(self._connection, StoreConnection):
            with translated(_in_words(keys)):
                found = self._connection.peek([self._key(key) for key in keys])
            return {key: found[full] for key in keys if (full := self._key(key)) in found}
        values = ((key, self.peek(key)) for key in keys)
        return {key: value for key, value in values if value is not None}

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
        with translated(_in_words(keys)):
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


def _in_words(keys: Sequence[str]) -> str:
    return ", ".join(keys) if len(keys) <= MOST_SHOWN_KEYS else f"{keys[0]} and {len(keys) - 1} more"


@contextmanager
def translated(key: str) -> Generator[None]:
    """Turn torch's store errors inside the block into Python's own."""
    try:
        yield
    except RuntimeError as error:
        if "timeout" in str(error).lower():
            raise TimeoutError(f"{key} was not set in the job's store in time") from error
        raise StoreLost(f"the job's store was lost (at {key}): {str(error).splitlines()[0]}") from error
