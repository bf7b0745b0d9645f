# SPDX-License-Identifier: Apache-2.0
"""The job's key-value store: how ranks tell each other small things outside the collectives.

Stands on torch.distributed's TCPStore and FileStore. A Store value is one connection, to be used by one
thread at a time; ``clone()`` gives another thread its own. Opened by process_group and the launcher.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

CONNECT_TIMEOUT_SECONDS = 300.0
"""How long a rank waits for the store to be served: ranks may start minutes apart on a cluster."""


class StoreLost(ConnectionError):
    """The process that serves the store is gone."""


class Store:
    """One connection to the job's store. Keys are text, values are bytes, nothing is unpickled."""

    def __init__(self, torch_store: dist.Store) -> None:
        self.torch_store = torch_store

    def clone(self) -> Store:
        """Return a connection of its own to the same store, for another thread."""
        return Store(self.torch_store.clone())  # pyright: ignore[reportAttributeAccessIssue] - newer than torch's stub

    def prefixed(self, prefix: str) -> Store:
        """Return the part of the store whose keys start with ``prefix``."""
        return Store(dist.PrefixStore(prefix, self.torch_store))

    def set(self, key: str, value: bytes | str) -> None:
        """Set ``key``, replacing what it held."""
        with _translated(key):
            self.torch_store.set(key, value)  # pyright: ignore[reportArgumentType] - it takes bytes too

    def set_if_absent(self, key: str, value: str) -> bool:
        """Set ``key`` unless it is there already, in one step; return whether it was set."""
        with _translated(key):
            return self.torch_store.compare_set(key, "", value) == value.encode()

    def get(self, key: str, timeout_seconds: float) -> bytes:
        """Return the value of ``key``, waiting for it to be set.

        Raises:
            TimeoutError: it was not set within ``timeout_seconds``.
            StoreLost: the store is gone.
        """
        self.wait([key], timeout_seconds)
        with _translated(key):
            return self.torch_store.get(key)

    def wait(self, keys: Sequence[str], timeout_seconds: float) -> None:
        """Return when every key is set. Raises as :meth:`get` does."""
        with _translated(", ".join(keys)):
            self.torch_store.wait(list(keys), timedelta(seconds=timeout_seconds))

    def add(self, key: str, number: int) -> int:
        """Add ``number`` to the counter ``key`` (0 at first) and return the sum."""
        with _translated(key):
            return self.torch_store.add(key, number)

    def check(self, key: str) -> bool:
        """Return whether ``key`` is set."""
        with _translated(key):
            return self.torch_store.check([key])

    def delete(self, key: str) -> None:
        """Remove ``key`` if it is there."""
        with _translated(key):
            self.torch_store.delete_key(key)


class _translated:  # noqa: N801 - reads as a word in `with _translated(key):`
    """Turns torch's store errors into Python's own."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RuntimeError):
            return
        if "timeout" in str(error).lower():
            message = f"nobody set {self._key} in the job's store in time"
            raise TimeoutError(message) from error
        message = f"the job's store is gone (at {self._key}): {str(error).splitlines()[0]}"
        raise StoreLost(message) from error


def serve(host: str = "127.0.0.1", port: int = 0) -> tuple[Store, int]:
    """Serve a new store on one address and return it with its port.

    Args:
        host: the address to listen on; only this one, unless it is ``"0.0.0.0"``.
        port: 0 takes a free one: it is bound first and told afterwards, never picked and then used.

    Raises:
        ConfigurationError: the address or port cannot be bound.

    Source: torch.distributed.TCPStore with ``master_listen_fd``.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"The job's store cannot be served on {host}:{port}: {error.strerror}.",
            do="give another port (MASTER_PORT or init_method), or end the process that holds this one: "
            f"ss -ltnp 'sport = :{port}'",
        ) from error
    listener.listen(1024)
    port = listener.getsockname()[1]
    torch_store = dist.TCPStore(host, port, None, True, master_listen_fd=listener.detach(), wait_for_workers=False)
    return Store(torch_store), port


def connect(host: str, port: int, timeout_seconds: float = CONNECT_TIMEOUT_SECONDS) -> Store:
    """Return a connection to a store that another process serves, waiting until it does.

    Raises:
        TimeoutError: nothing served ``host:port`` within ``timeout_seconds``.
    """
    with _translated(f"{host}:{port}"):
        return Store(
            dist.TCPStore(
                host,
                port,
                None,
                False,
                timeout=timedelta(seconds=timeout_seconds),
                wait_for_workers=False,
            )
        )


def open_file(path: str, world_size: int) -> Store:
    """Return the store kept in a file that every rank can reach. Slower than a served one."""
    return Store(dist.FileStore(path, world_size))
