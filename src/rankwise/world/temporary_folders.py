# SPDX-License-Identifier: Apache-2.0
"""Temporary folders that have rankwise's name, and are removed even if the process that made them was killed.

A process cannot clean up after SIGKILL, so that the next one that makes such a folder does it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from pathlib import Path

from rankwise.world.processes import machine_name

PREFIX = "rankwise-"
IN_USE = ".rankwise-in-use"
"""A file in each folder, locked for as long as the process that made it, or one forked from that, is alive."""

_locks: dict[Path, int] = {}


def make_temporary_folder(kind: str = "", parent: Path | None = None) -> Path:
    """Return a new folder ``rankwise-KIND-...``; first remove those of processes of this machine that were killed.

    Args:
        kind: what it is for; may be empty.
        parent: where to make it; the folder for temporary files by default.

    Raises:
        OSError: it cannot be made.
    """
    where = Path(tempfile.gettempdir()) if parent is None else parent
    for lock in where.glob(f"{PREFIX}*/{IN_USE}"):
        with contextlib.suppress(OSError):
            _remove_if_left(lock)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-" if kind else PREFIX, dir=where))
    # On a file system without locks the folder is one that nobody else removes.
    with contextlib.suppress(OSError):
        unlocked, name = folder / f"{IN_USE}.new", _this_machine()
        descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        _locks[folder] = descriptor
        os.write(descriptor, name)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Only now others look at it.
        unlocked.rename(folder / IN_USE)
    return folder


def remove_temporary_folder(folder: Path) -> None:
    """Remove a folder of this process; what cannot be removed is left for the next one."""
    shutil.rmtree(folder, ignore_errors=True)
    descriptor = _locks.pop(folder, None)
    if descriptor is not None:
        os.close(descriptor)


def _remove_if_left(lock: Path) -> None:
    """Remove the folder of a lock that no process of this machine holds."""
    if lock.parent.lstat().st_uid != os.getuid():
        return
    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        # Machines that share a disk need not see each other's locks.
        if os.read(descriptor, len(_this_machine()) + 1) == _this_machine():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    finally:
        os.close(descriptor)


def _this_machine() -> bytes:
    """Return what identifies this machine since its start, and the container. Raises OSError if nothing does."""
    return f"{socket.gethostname()} {machine_name()}".encode()
