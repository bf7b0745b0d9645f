# SPDX-License-Identifier: Apache-2.0
"""The lock on a folder of checkpoints: one job saves there at a time, and a dead job's lock blocks no other job.

Works where ``flock`` does not, by what every file system offers: a file is created by one process only. Rank zero
holds the lock for its job, and every rank learns the result. ``docs/decisions`` explains the design.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import re
import threading
import time
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from rankwise.checkpoint.lock_owner import LockOwner, decode, read
from rankwise.comm.session import current
from rankwise.errors import CheckpointError
from rankwise.health.fork_safety import hold_during_forks
from rankwise.health.preemption import StepSource
from rankwise.log import log, warn
from rankwise.tensors.synced_folders import make_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from pathlib import Path

    from rankwise.checkpoint.phases import CheckpointRanks


T = TypeVar("T")

PREFIX = ".rankwise-lock-"
REFRESH_SECONDS = 4.0
"""How often the owner changes its lock file."""
WATCH_SECONDS = 20.0
"""How long the lock of another machine is watched for a change before its owner counts as dead."""
POLL_SECONDS = 0.5
"""How often it is read meanwhile."""

_NUMBERED = re.compile(re.escape(PREFIX) + r"(\d{1,9})")

LockVerdict = list[str] | None
"""The result of a step of a claim: ``None`` to continue, an empty list once the folder is this job's, else a
description of the owner and what to do."""

_held: dict[str, _HeldLock] = {}


class FolderLock:
    """The lock of one folder, held by one Checkpointer; those of one process share it. Rank zero only."""

    def __init__(self, folder: Path) -> None:
        """Read nothing yet."""
        self.folder = folder
        self._dead: set[str] = set()
        """Locks whose owners were found dead, by their content."""

    def acquire(self) -> Generator[LockVerdict]:
        """Take the lock, a step at a time; the last step has the verdict.

        Raises:
            CheckpointError: the disk on which this process holds the lock is no longer there.
            OSError: the folder cannot be made or written to.
        """
        key = os.path.realpath(self.folder)
        held = _held.get(key)
        own = held.owner if held is not None and held.is_of_this_process else LockOwner.this_process()
        if held is not None and own is held.owner and not _is_lock_of(held.path, own):
            held.check_folder()
        make_folder(self.folder)
        path = None
        while True:
            locks = _locks(self.folder)
            path = next((each for each in locks.values() if _is_lock_of(each, own)), None)
            others = [each for each in locks.values() if each != path]
            for other in others:
                verdict = yield from self._judge(other, own)
                if verdict:
                    if path is not None:
                        path.unlink(missing_ok=True)
                    yield verdict
                    return
            if path is not None:
                break
            # One number above the dead locks: of several processes that get here, one creates the file.
            _create(self.folder / f"{PREFIX}{max(locks, default=0) + 1}", own)
        for other in others:
            # One that cannot be removed is judged dead again by the next process.
            with contextlib.suppress(OSError):
                other.unlink()
        # The same folder may have another name here.
        if held is None or held.owner is not own or held.path.name != path.name:
            users: set[FolderLock] = set()
            if held is not None:
                held.stop()
                users = held.users if held.is_of_this_process else users
            held = _held[key] = _HeldLock(path, own, users)
        held.users.add(self)
        yield []

    def find_other_job(self, *, watches: bool) -> Generator[LockVerdict]:
        """Check whether another job holds the lock, a step at a time; the last step has the verdict.

        Args:
            watches: watch the lock of another machine; otherwise ignore it.
        """
        held = _held.get(os.path.realpath(self.folder))
        own = held.owner if held is not None and held.is_of_this_process else LockOwner.this_process()
        try:
            locks = _locks(self.folder)
        except OSError:
            locks = {}  # reported where its checkpoints are listed
        for path in locks.values():
            if not _is_lock_of(path, own):
                verdict = yield from self._judge(path, own, watches=watches)
                if verdict:
                    yield verdict
                    return
        yield []

    def release(self) -> None:
        """Release the lock, unless another Checkpointer of this process holds it too."""
        key = os.path.realpath(self.folder)
        held = _held.get(key)
        if held is None or not held.is_of_this_process:
            return
        held.users.discard(self)
        if not held.users:
            del _held[key]
            held.remove()

    def _judge(self, path: Path, own: LockOwner, *, watches: bool = True) -> Generator[LockVerdict, None, list[str]]:
        """Return who holds a lock and what to do about it; nothing where its owner is dead."""
        content = read(path)
        if content is None or (identity := _identity(path, content)) in self._dead:
            return []
        owner = decode(content)
        runs = None if owner is None else owner.is_running(own)
        if runs is None and watches:
            log(f"{self.folder} may be in use by {_describe(owner)}: watching it for {WATCH_SECONDS:.0f} s")
            runs = False
            for _ in range(round(WATCH_SECONDS / POLL_SECONDS)):
                time.sleep(POLL_SECONDS)
                yield None
                now = read(path)
                if now is None:
                    return []
                if _identity(path, now) != identity:
                    # It is another lock by now, or was still being written.
                    return (yield from self._judge(path, own))
                if now != content:
                    runs = True
                    break
            else:
                log(f"{self.folder} is free: {_describe(owner)} stopped refreshing its lock")
        if runs:
            return [f"{_describe(owner)}\nits lock is {path}", _what_to_do(owner, path)]
        if runs is False:
            self._dead.add(identity)
        return []


class _HeldLock:
    """A lock that this process holds, and the thread that refreshes it."""

    def __init__(self, path: Path, owner: LockOwner, users: set[FolderLock]) -> None:
        self.path = path
        self.owner = owner
        self.users = users
        self._disk = path.parent.stat().st_dev
        self._num_refreshes = 0
        self._ends = False
        # Held whenever the thread does more than wait, so that no fork happens in between.
        self._changed = threading.Condition()
        hold_during_forks(self._changed)
        self._thread = threading.Thread(target=self._refresh_until_stopped, name="rankwise-folder-lock", daemon=True)
        self._thread.start()

    @property
    def is_of_this_process(self) -> bool:
        """Whether it is not the lock of a process that this one was forked from."""
        return self.owner.pid == os.getpid()

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

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join()

    def remove(self) -> None:
        """Remove the lock file, if it is still this lock's."""
        self.stop()
        with contextlib.suppress(OSError):
            if _is_lock_of(self.path, self.owner):
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


@atexit.register
def _remove_all() -> None:
    for held in list(_held.values()):
        if held.is_of_this_process:
            held.remove()
    _held.clear()


def _locks(folder: Path) -> dict[int, Path]:
    """Return the lock files of a folder by number, in order; the highest is the last that was created."""
    try:
        names = [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {int(match[1]): folder / match[0] for name in sorted(names) if (match := _NUMBERED.fullmatch(name))}


def _create(path: Path, own: LockOwner) -> None:
    """Create a lock file, unless another process has."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(own.encode(0))
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _is_lock_of(path: Path, own: LockOwner) -> bool:
    content = read(path)
    return content is not None and decode(content) == own


def _identity(path: Path, content: bytes) -> str:
    """Return what distinguishes one lock from another, however often its owner has refreshed it."""
    owner = decode(content)
    return f"{path.name} {'' if owner is None else owner.token}"


def _describe(owner: LockOwner | None) -> str:
    return "a process that its lock file does not name" if owner is None else owner.description


def _what_to_do(owner: LockOwner | None, path: Path) -> str:
    end_it = "" if owner is None else f" (on {owner.hostname}: kill {owner.pid})"
    return (
        f"use another folder for this job, or end the other job first{end_it}.\n"
        "A script that only reads can call restore() without a loader, or rankwise.load().\n"
        f"If that process does not save there, remove {path.name}"
    )


REPORTED_BY_THE_SAVE = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.ENOENT,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
"""Errors that also keep a checkpoint from being written: the save reports them in clearer words."""


def acquire_for_job(ranks: CheckpointRanks, lock: FolderLock, then: Callable[[], T]) -> T:
    """Return once only this job saves into the folder, with rank zero's result of ``then``, which is JSON-able.

    Called by: every rank. Each calls ``then``, rank zero once it has the lock.

    Raises:
        CheckpointError: another job saves there; on every rank.
    """

    def steps() -> Generator[LockVerdict]:
        try:
            yield from lock.acquire()
        except OSError as error:
            if error.errno not in REPORTED_BY_THE_SAVE:
                warn(f"{lock.folder} cannot be locked ({error}): make sure that no other job saves there")
            yield []

    return _conclude(ranks, lock, steps(), then)


def refuse_other_job(ranks: CheckpointRanks, lock: FolderLock, objects: Iterable[object], then: Callable[[], T]) -> T:
    """Check whether another job saves where this one resumes from. Only reads; returns as :func:`acquire_for_job`.

    Called by: every rank.

    With a loader among the restored objects this job saves there at the latest when it is stopped; with an optimizer
    it likely will; with neither it may only read.

    Raises:
        CheckpointError: another job saves there, and a loader is among the objects; on every rank.
    """
    objects = list(objects)
    if any(isinstance(item, StepSource) for item in objects):
        return _conclude(ranks, lock, lock.find_other_job(watches=True), then)

    def mention() -> Generator[LockVerdict]:
        if any(isinstance(item, torch.optim.Optimizer) for item in objects):
            verdict = next(lock.find_other_job(watches=False))
            if verdict:
                owner = verdict[0].splitlines()[0]
                warn(f"another job saves into {lock.folder}: {owner}. This job cannot save there until that one ends")
        yield []

    return _conclude(ranks, lock, mention(), then)


def _conclude(ranks: CheckpointRanks, lock: FolderLock, steps: Generator[LockVerdict], then: Callable[[], T]) -> T:
    """Have rank zero run ``steps`` one at a time: the others must not wait long for it."""

    def step() -> tuple[LockVerdict, T | None]:
        verdict = next(steps) if ranks.rank == 0 else []
        return verdict, then() if verdict == [] else None

    while True:
        verdict, result = ranks.confirm(f"looking into {lock.folder}", step)[0]
        if verdict:
            owner, do = verdict
            raise CheckpointError(
                f"Another job saves into {lock.folder}.", where=f"reported on {current().world}", evidence=owner, do=do
            )
        if verdict is not None:
            return cast("T", result)
