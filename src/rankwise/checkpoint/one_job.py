# SPDX-License-Identifier: Apache-2.0
"""One job saves into a folder at a time: every rank learns what rank zero finds of the folder's lock.

Imported by the Checkpointer.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import torch

from rankwise.errors import CheckpointError
from rankwise.log import warn
from rankwise.session import current
from rankwise.stopping import StepSource

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from rankwise.checkpoint.confirm import Ranks
    from rankwise.checkpoint.lock import FolderLock, Verdict

TOLD_BY_THE_SAVE = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.ENOENT,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
"""What keeps a lock file from being written and a checkpoint too, which has better words for it."""


def take(ranks: Ranks, lock: FolderLock) -> None:
    """Return when this job alone saves into the folder.

    Called by: every rank.

    Raises:
        CheckpointError: another job saves there; on every rank.
    """

    def steps() -> Generator[Verdict]:
        try:
            yield from lock.take()
        except OSError as error:
            if error.errno not in TOLD_BY_THE_SAVE:
                warn(f"{lock.folder} cannot be locked ({error}): make sure that no other job saves there")
            yield []

    _conclude(ranks, lock, steps())


def look(ranks: Ranks, lock: FolderLock, objects: Iterable[object]) -> None:
    """Look whether another job saves where this one resumes from. Only reads.

    Called by: every rank.

    Args:
        ranks: who resumes.
        lock: of the folder.
        objects: that are restored. With a loader among them this job saves there when it is stopped, if not before;
            with an optimizer it likely will; with neither it may as well only read.

    Raises:
        CheckpointError: another job saves there, and a loader is among the objects; on every rank.
    """
    objects = list(objects)
    if any(isinstance(thing, StepSource) for thing in objects):
        _conclude(ranks, lock, lock.look(watches=True))
        return

    def mention() -> Generator[Verdict]:
        if any(isinstance(thing, torch.optim.Optimizer) for thing in objects):
            verdict = next(lock.look(watches=False))
            if verdict:
                owner = verdict[0].splitlines()[0]
                warn(f"another job saves into {lock.folder}: {owner}. This job cannot, until it ends")
        yield []

    _conclude(ranks, lock, mention())


def _conclude(ranks: Ranks, lock: FolderLock, steps: Generator[Verdict]) -> None:
    """Have rank zero go on with ``steps``, one at a time: the others must not wait long for it."""
    verdict: Verdict = None
    while verdict is None:
        verdict = ranks.confirm(f"locking {lock.folder}", lambda: next(steps) if ranks.rank == 0 else None)[0]
    if verdict:
        owner, do = verdict
        raise CheckpointError(
            f"Another job saves into {lock.folder}.", where=f"reported on {current().world}", evidence=owner, do=do
        )
