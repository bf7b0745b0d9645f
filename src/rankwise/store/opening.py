# SPDX-License-Identifier: Apache-2.0
"""Serving a store, and connecting to one: rankwise's own if there is a secret, else torch's.

Torch's has no password: any process that reaches its port can read and change everything. It is used only if an outer
launcher serves it, or no secret is set. A store is reached by its address or, on one machine, by the file in which its
port is published.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
import tempfile
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from rankwise.errors import ConfigurationError, NotRankwise, SecretRefused
from rankwise.store.client import Store, StoreConnection, connect_shared
from rankwise.store.wire import GREETING_SECONDS, checked_secret, greets, listen

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

    server = AuthenticatedServer(listen(host, port), secret, {}, {PURPOSE: Keys().serve})
    server.start()
    own_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - asked for by the caller
    return Store(
        StoreConnection(connect_shared(own_host, server.port, secret, OWN_TIMEOUT_SECONDS), server)
    ), server.port


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
        return Store(StoreConnection(connect_shared(host, port, secret, timeout_seconds)))
    first, last = min(timeout_seconds, DOUBT_SECONDS), ""
    for limit in (first, timeout_seconds - first) if timeout_seconds > first else (first,):
        try:
            return Store(_torch_client(host, port, limit))
        except (RuntimeError, TimeoutError) as error:
            last = str(error).partition("\n")[0] or "no answer"
        # Torch's client would retry against rankwise's server until the limit.
        if greets(host, port):
            raise _asks_for_a_secret(host, port)
    raise _no_store(host, port, timeout_seconds, last)


def _torch_client(host: str, port: int, timeout_seconds: float) -> dist.TCPStore:
    """Return a connection of torch's, which by itself waits without a limit for a program that sends nothing.

    Raises:
        RuntimeError: torch's, the program is no store of torch's.
        TimeoutError: there was none within ``timeout_seconds``.
    """
    connected: Future[dist.TCPStore] = Future()

    def run() -> None:
        limit = timedelta(seconds=timeout_seconds)
        try:
            connected.set_result(dist.TCPStore(host, port, None, False, timeout=limit, wait_for_workers=False))
        except Exception as error:  # noqa: BLE001 - whatever it is, join() waits for it
            connected.set_exception(error)

    threading.Thread(target=run, name="rankwise-torch-store", daemon=True).start()
    return connected.result(timeout_seconds)


def _no_store(host: str, port: int, timeout_seconds: float, last: str) -> Exception:
    within = f"within {timeout_seconds:.0f} s"
    try:
        socket.create_connection((host, port), GREETING_SECONDS).close()
    except OSError as error:
        return TimeoutError(f"nothing answered at {host}:{port} {within}: {error}")
    return NotRankwise(
        f"The program that listens at {host}:{port} is not the job's store: it did not answer as one {within}.",
        evidence=f"torch's client: {last}",
        do="set MASTER_PORT to another port for every rank, which rank 0 can listen on. "
        f"To see what listens: ss -ltnp 'sport = :{port}' on {host}",
    )


def _asks_for_a_secret(host: str, port: int) -> SecretRefused:
    return SecretRefused(
        f"The store at {host}:{port} requires a secret, and this process has none.",
        do="set the same RANKWISE_SECRET for every process of the job, or for none",
    )


def open_file(path: str, world_size: int) -> Store:
    """Return the store kept in a file that every rank can reach. Slower than a served one."""
    return Store(dist.FileStore(path, world_size))


# -- a store whose port is in a file ------------------------------------------------------------------

# Ranks on one machine find rank 0 by the name of their job alone. The file belongs to this user, and only this user
# can read it, since it holds the store's secret.


_LOOPBACK = "127.0.0.1"
DRAWN_SECRET_BYTES = 32
PUBLISHED_ATTEMPT_SECONDS = 2.0
"""How long a port is tried: the file may be left over from a killed job of the same name."""
_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.1


class _Published(NamedTuple):
    port: int
    secret: str | None
    """The secret that rank 0 generated if none was set."""


def serve_published(path: Path, secret: bytes | None) -> Store:
    """Serve a store on the loopback address and write its port to a file, which may replace one of this user.

    ``secret`` is what every rank was given; ``None`` generates one and writes it next to the port.

    Raises:
        ConfigurationError: the file cannot be written, or belongs to another user.
    """
    drawn = secrets.token_hex(DRAWN_SECRET_BYTES) if secret is None else None
    opened, port = serve(_LOOPBACK, 0, secret=secret or (drawn or "").encode())
    try:
        _publish(path, _Published(port, drawn))
    except OSError as error:
        opened.close()
        raise _not_ours(path, f"it cannot be written: {error.strerror}") from error
    return opened


def connect_published(path: Path, timeout_seconds: float, secret: bytes | None) -> Store:
    """Connect to the store that a file of :func:`serve_published` describes, waiting for both.

    ``secret`` is what every rank was given, or ``None``.

    Raises:
        TimeoutError: there was no such store within the limit.
        SecretRefused: this rank and the serving rank hold different secrets.
        ConfigurationError: the file belongs to another user.
    """
    deadline = time.monotonic() + timeout_seconds
    pause = _FIRST_PAUSE_SECONDS
    while True:
        problem: Exception = TimeoutError(f"rank 0 did not write {path} within {timeout_seconds:.0f} s")
        published = _published(path)
        if published is not None:
            try:
                limit = min(PUBLISHED_ATTEMPT_SECONDS, max(deadline - time.monotonic(), _FIRST_PAUSE_SECONDS))
                del problem  # Its traceback may refer to this frame.
                return connect(_LOOPBACK, published.port, limit, secret=_secret_of(published, secret))
            except (TimeoutError, NotRankwise, SecretRefused) as error:
                problem = error
        if time.monotonic() + pause > deadline:
            raise problem
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)


def _secret_of(published: _Published, given: bytes | None) -> bytes:
    if given is not None:
        return given
    if published.secret is None:
        raise SecretRefused(
            "Rank 0 was given RANKWISE_SECRET, and this rank was not.",
            do="set the same RANKWISE_SECRET for every rank, or for none",
        )
    return published.secret.encode()


def _publish(path: Path, published: _Published) -> None:
    """Write the file atomically and never readable by other users."""
    descriptor, name = tempfile.mkstemp(prefix=f"{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(published._asdict(), file)
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


def _published(path: Path) -> _Published | None:
    """Return the contents of the file; ``None`` if there is none yet, or only one with other contents."""
    try:
        # Neither a link to elsewhere, nor a pipe that would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _not_ours(path, f"it cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, encoding="utf-8") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
            raise _not_ours(path, f"user {facts.st_uid}, {stat.filemode(facts.st_mode)}")
        try:
            published: dict[str, Any] = json.load(file)
            return _Published(port=int(published["port"]), secret=published["secret"])
        except (ValueError, KeyError, TypeError):
            return None


def _not_ours(path: Path, found: str) -> ConfigurationError:
    return ConfigurationError(
        f"{path}, in which rank 0 publishes how to reach it, does not belong to this user.",
        evidence=found,
        do=f"rm {path}, or set TMPDIR to a directory of your own for every rank",
    )
