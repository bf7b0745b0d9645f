# SPDX-License-Identifier: Apache-2.0
"""Serving a store, and connecting to one: rankwise's own if there is a secret, else torch's.

Torch's has no password: any process that reaches its port can read and change everything. It is used only if an outer
launcher serves it, or no secret is set.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from rankwise.errors import SecretRefused
from rankwise.store.client import StoreConnection
from rankwise.store.values import Store, translated
from rankwise.store.wire import checked_secret, greets, listen

CONNECT_TIMEOUT_SECONDS = 300.0
"""How long a rank waits for the store: ranks may start minutes apart on a cluster."""
DOUBT_SECONDS = 5.0
"""After how long without an answer a store thought to be torch's is probed for being rankwise's."""
OWN_TIMEOUT_SECONDS = 60.0
"""How long the server's own process waits for its thread."""


_kept: dict[tuple[str, int], dist.TCPStore] = {}
"""Torch stores that this process serves on a given port until it exits: torch's cannot be closed."""


def serve(host: str = "127.0.0.1", port: int = 0, *, secret: bytes | None = None) -> tuple[Store, int]:
    """Serve a store on one address and return it with its port.

    It is new, and served until the last Store of it in this process is deleted or closed. Only torch's on a given
    port is served until the process exits, and reused: models of a world that was left may keep it alive.

    Args:
        host: the address to listen on; only this one, unless it is ``"0.0.0.0"``.
        port: 0 takes a free one: it is bound first and reported afterwards, never picked first and bound later.
        secret: what others must hold to connect; ``None`` serves torch's store, which accepts every process.

    Raises:
        ConfigurationError: the address or port cannot be bound, or the secret is empty.

    Source: torch.distributed.TCPStore with ``master_listen_fd``, where there is no secret.
    """
    if secret is not None:
        return _serve_own(host, port, checked_secret(secret))
    if (host, port) in _kept:
        return Store(_kept[host, port]).clone(), port
    listener = listen(host, port)
    given, port = port, listener.getsockname()[1]
    torch_store = dist.TCPStore(host, port, None, True, master_listen_fd=listener.detach(), wait_for_workers=False)
    if given:
        _kept[host, port] = torch_store
    return Store(torch_store), port


def _serve_own(host: str, port: int, secret: bytes) -> tuple[Store, int]:
    # Only the serving process needs an event loop.
    from rankwise.store.keys import PURPOSE, Keys  # noqa: PLC0415
    from rankwise.store.server import AuthenticatedServer  # noqa: PLC0415

    server = AuthenticatedServer(listen(host, port), secret, {PURPOSE: Keys().handle})
    server.start()
    own_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - asked for by the caller
    return Store(StoreConnection(own_host, server.port, secret, OWN_TIMEOUT_SECONDS, server)), server.port


def connect(
    host: str, port: int, timeout_seconds: float = CONNECT_TIMEOUT_SECONDS, *, secret: bytes | None = None
) -> Store:
    """Return a connection to a store that another process serves at ``host:port``, waiting until it is served.

    ``secret`` is what it was served with; ``None`` for torch's store.

    Raises:
        TimeoutError: nothing served ``host:port`` within ``timeout_seconds``.
        SecretRefused: it is served with another secret, or with one while this process has none.
        NotRankwise: another program listens there.
    """
    if secret is not None:
        return Store(StoreConnection(host, port, secret, timeout_seconds))
    with translated(f"{host}:{port}"):
        first = min(timeout_seconds, DOUBT_SECONDS)
        try:
            return Store(_torch_client(host, port, first))
        except RuntimeError:
            # Torch's client would retry against rankwise's server until the limit.
            if greets(host, port):
                raise _asks_for_a_secret(host, port) from None
            if timeout_seconds <= first:
                raise
        return Store(_torch_client(host, port, timeout_seconds - first))


def _torch_client(host: str, port: int, timeout_seconds: float) -> dist.TCPStore:
    limit = timedelta(seconds=timeout_seconds)
    return dist.TCPStore(host, port, None, False, timeout=limit, wait_for_workers=False)


def _asks_for_a_secret(host: str, port: int) -> SecretRefused:
    return SecretRefused(
        f"The store at {host}:{port} requires a secret, and this process has none.",
        do="set the same RANKWISE_SECRET for every process of the job, or for none",
    )


def open_file(path: str, world_size: int) -> Store:
    """Return the store kept in a file that every rank can reach. Slower than a served one."""
    return Store(dist.FileStore(path, world_size))
