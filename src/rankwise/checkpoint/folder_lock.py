# SPDX-License-Identifier: Apache-2.0
"""The lock on a folder of checkpoints: one job saves there at a time, and a dead job's lock blocks no other job.

Works where ``flock`` does not, by what every file system offers: a file is created by one process only. Rank zero
holds the lock for its job, and every rank learns the result. ``docs/decisions`` explains the design.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass, fields
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar, cast

import torch

from rankwise.checkpoint.folder import make_folder
from rankwise.comm.session import current
from rankwise.errors import CheckpointError
from rankwise.health import process_probe
from rankwise.health.fork_safety import hold_during_forks
from rankwise.health.preemption import StepSource
from rankwise.log import log, warn
from rankwise.world.environments.process import job_of_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rankwise.comm.agreement import CheckpointRanks

T = TypeVar("T")

PREFIX = ".rankwise-lock-"
REFRESH_SECONDS = 4.0
"""How often the owner changes its lock file."""
WATCH_SECONDS = 20.0
"""How long the lock of another machine is watched for a change before its owner counts as dead."""
LOCK_POLL_SECONDS = 0.5
"""How often it is read meanwhile."""
_REPORTED = ["EACCES", "EDQUOT", "EEXIST", "ENOENT", "ENOSPC", "ENOTDIR", "EPERM", "EROFS"]
"""Errors that also keep a checkpoint from being written: the save reports them in clearer words."""
_LATEST_SECONDS = 1e11
"""The latest time that can be shown as a date."""
_NUMBERED = re.compile(re.escape(PREFIX) + r"(\d{1,9})")

LockVerdict = list[str] | None
"""The result of a check: an empty list if the folder is free or this job's, else a description of the owner and what to
do; ``None`` while the lock of another machine is being watched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LockOwner:
    """The process that holds a lock, as its lock file describes it. Later versions may add fields."""

    hostname: str
    machine: str
    """Identifies the machine's current boot and the container, in which PIDs are unique. Empty if unknown."""
    pid: int
    start_time: str
    """When the kernel started the process, in its own ticks; unique together with ``pid``. Empty if unknown."""
    command: str
    job: str
    """Unique name of the launcher's job; empty without one."""
    attempt: int
    """Number of the job's restart."""
    since: float
    """When the lock was taken, in seconds since the epoch by the owner's clock. For display only."""
    token: str
    """Distinguishes this lock from every other one."""

    @classmethod
    def this_process(cls) -> Self:
        """Return this process as the owner of a new lock; its command without arguments, which may be private."""
        job, attempt = job_of_process()
        name = Path(sys.argv[0] if sys.argv else "").name.encode(errors="replace").decode()
        return cls(
            hostname=socket.gethostname(),
            machine=process_probe.this_process().host,
            pid=os.getpid(),
            start_time=process_probe.start_time_of(os.getpid()),
            command=" ".join(name.split())[:100],
            job=job,
            attempt=attempt,
            since=time.time(),
            token=secrets.token_hex(8),
        )

    def encode(self, num_refreshes: int) -> bytes:
        """Return the content of the lock file, which does not get shorter from one refresh to the next."""
        return (json.dumps({**asdict(self), "signs_of_life": num_refreshes}, indent=1) + "\n").encode()

    def is_running(self, viewer: LockOwner) -> bool | None:
        """Return whether the owner runs and its lock counts; ``None`` if ``viewer`` (this process) cannot know."""
        if self.job and self.job == viewer.job and self.attempt < viewer.attempt:
            return False  # The launcher starts an attempt only when the previous one has ended.
        # Cloned machines may differ only in their name.
        if not self.machine or (self.machine, self.hostname) != (viewer.machine, viewer.hostname):
            return None
        # With this PID: an earlier lock of this process, or of an earlier process.
        return self.pid != viewer.pid and process_probe.is_there(self.pid, self.start_time)


def decode(content: bytes) -> LockOwner | None:
    """Return the owner that a lock file describes; ``None`` while it is being written, or for anything else."""
    try:
        saved = json.loads(content)
        held = {each.name: saved[each.name] for each in fields(LockOwner)}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    # Annotations are texts here: "str", "int" and "float".
    if [type(one).__name__ for one in held.values()] != [each.type for each in fields(LockOwner)]:
        return None
    owner = LockOwner(**held)
    return owner if owner.pid > 0 and 0 <= owner.since < _LATEST_SECONDS else None


class _LockFile(NamedTuple):
    """A lock file as it was read."""

    number: int
    path: Path
    content: bytes
    owner: LockOwner | None


def _read_all(folder: Path) -> list[_LockFile]:
    """Return the lock files of a folder, the last that was created at the end.

    Opens them again each time: network file systems then check with the server.
    """
    found: list[_LockFile] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            if match := _NUMBERED.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):
                    content = path.read_bytes()
                    found.append(_LockFile(int(match[1]), path, content, decode(content)))
    return sorted(found, key=itemgetter(0))


def _refusal(lock: _LockFile) -> list[str]:
    """Return the owner of a lock, and what to do about it."""
    owner = lock.owner
    end_it = "" if owner is None else f" (on {owner.hostname}: kill {owner.pid})"
    do = (
        f"use another folder for this job, or end the other job first{end_it}.\n"
        "A script that only reads can call restore() without a loader, or rankwise.load().\n"
        f"If that process does not save there, remove {lock.path.name}"
    )
    return [f"{_describe(owner)}\nits lock is {lock.path}", do]


def _describe(owner: LockOwner | None) -> str:
    if owner is None:
        return "a process that its lock file does not name"
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(owner.since))
    return f"process {owner.pid} on {owner.hostname} ({owner.command or 'python'}), since {since}"


class FolderLock:
    """The lock of one folder, held by one Checkpointer; those of one process share it. Rank zero only."""

    def __init__(self, folder: Path) -> None:
        """Read nothing yet."""
        self.folder = folder
        self._watched: dict[tuple[str, object], tuple[bytes, int]] = {}
        """By the name and the owner of another machine's lock: its content, and how many checks have found it the same.
        """

    def acquire(self) -> LockVerdict:
        """Take the lock, if no other job holds it; called again until there is a verdict.

        Raises:
            CheckpointError: the disk on which this process holds the lock is no longer there.
            OSError: the folder cannot be made or written to.
        """
        key = os.path.realpath(self.folder)
        held = _held.get(key)
        own = LockOwner.this_process() if held is None else held.owner
        while True:
            locks = _read_all(self.folder)
            mine = next((lock for lock in locks if lock.owner == own), None)
            if mine is None:
                if held is not None:
                    held.check_folder()
                make_folder(self.folder)
            others = [lock for lock in locks if lock is not mine]
            verdict = self._judge(others, own, watches=True)
            if verdict != []:
                if verdict and mine is not None:
                    mine.path.unlink(missing_ok=True)
                return verdict
            if mine is not None:
                break
            # One number above the dead locks: of several processes that get here, one creates the file.
            _create(self.folder / f"{PREFIX}{locks[-1].number + 1 if locks else 1}", own)
        for other in others:
            with contextlib.suppress(OSError):  # One that remains is judged dead again by the next process.
                other.path.unlink()
        if held is None:
            held = _held[key] = _HeldLock(mine.path, own)
        held.path = mine.path
        held.users.add(self)
        return []

    def find_other_job(self, *, watches: bool) -> LockVerdict:
        """Check whether another job holds the lock, as :meth:`acquire`; or ignore those of other machines."""
        held = _held.get(os.path.realpath(self.folder))
        own = LockOwner.this_process() if held is None else held.owner
        with contextlib.suppress(OSError):  # reported where its checkpoints are listed
            return self._judge([lock for lock in _read_all(self.folder) if lock.owner != own], own, watches=watches)
        return []

    def release(self) -> None:
        """Release the lock, unless another Checkpointer of this process holds it too."""
        key = os.path.realpath(self.folder)
        held = _held.get(key)
        if held is not None:
            held.users.discard(self)
            if not held.users:
                _held.pop(key).remove()

    def _judge(self, locks: Iterable[_LockFile], own: LockOwner, *, watches: bool) -> LockVerdict:
        """Return the owner of one of ``locks`` and what to do about it."""
        is_known = True
        for lock in locks:
            runs = lock.owner and lock.owner.is_running(own)
            if runs is None and watches:
                runs = self._is_refreshed(lock)
                is_known = is_known and runs is not None
            if runs:
                return _refusal(lock)
        if not is_known:
            time.sleep(LOCK_POLL_SECONDS)
        return [] if is_known else None

    def _is_refreshed(self, lock: _LockFile) -> bool | None:
        """Check once more the lock of another machine; ``None`` while it has to be watched."""
        identity = lock.path.name, lock.owner or lock.content
        if identity not in self._watched:
            log(f"{self.folder} may be in use by {_describe(lock.owner)}: watching it for {WATCH_SECONDS:.0f} s")
        before, num_checks = self._watched.pop(identity, (lock.content, 0))
        if lock.content != before:
            return True
        self._watched[identity] = lock.content, num_checks + 1
        if num_checks < (most := round(WATCH_SECONDS / LOCK_POLL_SECONDS)):
            return None
        if num_checks == most:
            log(f"{self.folder} is free: {_describe(lock.owner)} stopped refreshing its lock")
        return False


class _HeldLock:
    """A lock that this process holds, and the thread that refreshes it."""

    def __init__(self, path: Path, owner: LockOwner) -> None:
        self.path, self.owner = path, owner
        self.users: set[FolderLock] = set()
        self._disk = path.parent.stat().st_dev
        self._num_refreshes = 0
        self._ends = False
        # Held whenever the thread does more than wait, so that no fork happens in between.
        self._changed = threading.Condition()
        hold_during_forks(self._changed)
        self._thread = threading.Thread(target=self._refresh_until_stopped, name="rankwise-folder-lock", daemon=True)
        self._thread.start()

    def check_folder(self) -> None:
        """Warn about a folder that was removed together with the lock; raise if its disk is not there either.

        The state that is saved next may be the only copy, so that a removed folder is created again.
        """
        folder = self.path.parent
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        if nearest.stat().st_dev != self._disk:
            raise CheckpointError(
                f"{folder} is no longer on the disk that this job saves to.",
                evidence=f"{self.path} is missing, and {nearest} is on another file system than it was",
                do="mount that disk again: saving would fill another one",
            )
        if nearest != folder:
            warn(
                f"{folder} was removed with its checkpoints while this job saves there: it is created and locked again"
            )

    def remove(self) -> None:
        """End the thread, and remove the lock file if it is still this lock's."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join()
        with contextlib.suppress(OSError):
            if decode(self.path.read_bytes()) == self.owner:
                self.path.unlink()

    def _refresh_until_stopped(self) -> None:
        with self._changed:
            while not self._changed.wait_for(lambda: self._ends, REFRESH_SECONDS):
                # A disk that fails for a while must not end it; the next save checks the lock again.
                with contextlib.suppress(OSError):
                    self._refresh()

    def _refresh(self) -> None:
        with self.path.open("r+b") as file:
            if decode(file.read()) == self.owner:
                self._num_refreshes += 1
                file.seek(0)
                file.write(self.owner.encode(self._num_refreshes))


_held: dict[str, _HeldLock] = {}
"""The locks of this process, by the real path of the folder. A fork of it holds none."""
os.register_at_fork(after_in_child=_held.clear)


@atexit.register
def _remove_all() -> None:
    while _held:
        _held.popitem()[1].remove()


def _create(path: Path, own: LockOwner) -> None:
    """Create a lock file, unless another process has."""
    try:
        file = path.open("xb")
    except FileExistsError:
        return
    try:
        with file:
            file.write(own.encode(0))
    except OSError:
        path.unlink(missing_ok=True)
        raise


def acquire_for_job(ranks: CheckpointRanks, lock: FolderLock, then: Callable[[], T]) -> T:
    """Return once only this job saves into the folder, with rank zero's result of ``then``, which is JSON-able.

    Called by: every rank. Rank zero calls ``then``, once it has the lock.

    Raises:
        CheckpointError: another job saves there; on every rank.
    """

    def try_to_acquire() -> LockVerdict:
        try:
            return lock.acquire()
        except OSError as error:
            if errno.errorcode.get(error.errno or 0) not in _REPORTED:
                warn(f"{lock.folder} cannot be locked ({error}): make sure that no other job saves there")
            return []

    return _conclude(ranks, lock, try_to_acquire, then)


def refuse_other_job(ranks: CheckpointRanks, lock: FolderLock, objects: Iterable[object]) -> None:
    """Check whether another job saves where this one resumes from. Only reads. Called by: every rank.

    With a loader among the restored objects this job saves there at the latest when it is stopped; with an optimizer
    it likely will; with neither it may only read.

    Raises:
        CheckpointError: another job saves there, and a loader is among the objects; on every rank.
    """
    objects = list(objects)

    def warn_of_other_job() -> LockVerdict:
        verdict = lock.find_other_job(watches=False)
        if verdict and any(isinstance(item, torch.optim.Optimizer) for item in objects):
            owner = verdict[0].splitlines()[0]
            warn(f"another job saves into {lock.folder}: {owner}. This job cannot save there until that one ends")
        return []

    resumes = any(isinstance(item, StepSource) for item in objects)
    _conclude(ranks, lock, partial(lock.find_other_job, watches=True) if resumes else warn_of_other_job, lambda: None)


def _conclude(ranks: CheckpointRanks, lock: FolderLock, check: Callable[[], LockVerdict], then: Callable[[], T]) -> T:
    """Have rank zero check until there is a verdict, one check at a time: the others must not wait long for it."""

    def check_once() -> tuple[LockVerdict, T | None]:
        verdict = check() if ranks.rank == 0 else None
        return verdict, then() if verdict == [] else None

    while True:
        verdict, result = ranks.confirm(f"looking into {lock.folder}", check_once)[0]
        if verdict:
            owner, do = verdict
            raise CheckpointError(
                f"Another job saves into {lock.folder}.", where=f"reported on {current().world}", evidence=owner, do=do
            )
        if verdict is not None:
            return cast("T", result)
