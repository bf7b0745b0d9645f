# SPDX-License-Identifier: Apache-2.0
"""A store whose port is in a file: ranks on one machine find rank 0 by the name of their job alone.

The file belongs to this user, and only this user can read it, since it holds the store's secret. Knows no jobs; the
name is passed in.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rankwise.errors import ConfigurationError, NotRankwise, SecretRefused
from rankwise.store.opening import connect, serve

if TYPE_CHECKING:
    from rankwise.store.values import Store

LOOPBACK = "127.0.0.1"
DRAWN_SECRET_BYTES = 32
ATTEMPT_SECONDS = 2.0
"""How long a port is tried: the file may be left over from a killed job of the same name."""
FIRST_PAUSE_SECONDS = 0.01
LONGEST_PAUSE_SECONDS = 0.1


class _Published(NamedTuple):
    port: int
    secret: str | None
    """The secret that rank 0 generated if none was set."""


def serve_published(path: Path, secret: bytes | None) -> Store:
    """Serve a store on the loopback address and write its port to a file, which may replace one of this user.

    ``secret`` is what every rank was given; ``None`` generates one and writes it beside the port.

    Raises:
        ConfigurationError: the file cannot be written, or belongs to another user.
    """
    drawn = secrets.token_hex(DRAWN_SECRET_BYTES) if secret is None else None
    opened, port = serve(LOOPBACK, 0, secret=secret or (drawn or "").encode())
    try:
        _write(path, _Published(port, drawn))
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
    pause = FIRST_PAUSE_SECONDS
    while True:
        problem: Exception = TimeoutError(f"rank 0 did not write {path} within {timeout_seconds:.0f} s")
        published = _read(path)
        if published is not None:
            try:
                limit = min(ATTEMPT_SECONDS, max(deadline - time.monotonic(), FIRST_PAUSE_SECONDS))
                return connect(LOOPBACK, published.port, limit, secret=_secret_of(published, secret))
            except (TimeoutError, NotRankwise, SecretRefused) as error:
                problem = error
        if time.monotonic() + pause > deadline:
            raise problem
        time.sleep(pause)
        pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)


def forget_published(path: Path) -> None:
    """Remove the file. Called by the serving rank once the others have connected or never will."""
    path.unlink(missing_ok=True)


def _secret_of(published: _Published, given: bytes | None) -> bytes:
    if given is not None:
        return given
    if published.secret is None:
        raise SecretRefused(
            "Rank 0 was given RANKWISE_SECRET, and this rank was not.",
            do="set the same RANKWISE_SECRET for every rank, or for none",
        )
    return published.secret.encode()


def _write(path: Path, published: _Published) -> None:
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


def _read(path: Path) -> _Published | None:
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
