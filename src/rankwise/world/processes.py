# SPDX-License-Identifier: Apache-2.0
"""The processes of this machine, as the kernel lists them in ``/proc``; adopting and killing those below this one.

Also their temporary folders, which are removed even if the process that made them was killed. Linux only; elsewhere
processes are not adopted.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


class ProcessStat(NamedTuple):
    """What the kernel reports of a process. Source: proc_pid_stat(5)."""

    pid: int
    name: str
    """The first 15 bytes of its program's name."""
    state: str
    """One letter: ``R`` runs, ``T`` was stopped, ``Z`` has exited and has not been waited for."""
    parent: int
    group: int
    """Its process group id."""
    cpu_ticks: int
    """CPU time of the process and of its children that have exited and been waited for."""
    start_time: str
    """When it was started, in ticks since boot. Together with ``pid``, unique until the next boot."""


def stat_of(pid: int) -> ProcessStat | None:
    """Return what the kernel reports of a process; ``None`` if it does not exist, or without ``/proc``."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name is in parentheses and may itself contain spaces and parentheses.
    before, _, after = text.rpartition(")")
    fields = after.split()
    if not fields:
        return None
    return ProcessStat(
        pid=pid,
        name=before.partition("(")[2],
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        cpu_ticks=sum(map(int, fields[11:15])),
        start_time=fields[19],
    )


def all_stats() -> Iterator[ProcessStat]:
    """Yield what the kernel reports of every process that this one may see."""
    for entry in Path("/proc").glob("[0-9]*"):
        stat = stat_of(int(entry.name))
        if stat is not None:
            yield stat


def machine_name() -> str:
    """Return an identifier of this boot of the machine and of the container: process ids are unique within these.

    Raises:
        OSError: there is no ``/proc``.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


KILL_POLL_SECONDS = 0.01
"""After how long killed processes are checked again: their children are reparented here."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent exits. Source: prctl(2)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have this process killed when its parent exits. Source: prctl(2)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def children() -> list[int]:
    """Return the processes whose parent is this one."""
    own = os.getpid()
    return [stat.pid for stat in all_stats() if stat.parent == own]


def kill_since(start_time: int, limit_seconds: float) -> None:
    """Kill the descendants that started at ``start_time`` (ticks) or later; wait for them, up to ``limit_seconds``."""
    own = os.getpid()
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        left = [stat.pid for stat in all_stats() if stat.parent == own and int(stat.start_time) >= start_time]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(KILL_POLL_SECONDS)


def _prctl(option: int, value: int) -> None:
    """Set a property of this process. Source: prctl(2); does nothing except on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# -- temporary folders --------------------------------------------------------------------------------

# A process cannot clean up after SIGKILL, so that the next one that makes such a folder does it.


FOLDER_PREFIX = "rankwise-"
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
    for lock in where.glob(f"{FOLDER_PREFIX}*/{IN_USE}"):
        with contextlib.suppress(OSError):
            _remove_if_left(lock)
    folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{kind}-" if kind else FOLDER_PREFIX, dir=where))
    # On a file system without locks the folder is one that no other process removes.
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
