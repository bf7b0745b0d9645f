# SPDX-License-Identifier: Apache-2.0
"""Saved state that is complete under its name or absent, also after a power loss: write, sync, rename, sync.

POSIX guarantees only what ``fsync`` was called for: of a file its bytes, of a folder its names. All saved state
(checkpoints, weights, snapshots of servers; elastic commits, without the sync) is written through here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path


def sync(path: Path) -> None:
    """Return when the bytes of a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents; on disk when this returns."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def commit(staging: Path, target: Path, aside: Path | None = None) -> None:
    """Rename ``staging`` to ``target``; on disk when this returns.

    Args:
        staging: a file, or a folder whose files are on disk already.
        target: beside it. A file that is there is replaced.
        aside: where a folder that is there goes first, since a rename cannot replace it. Removed once the new one is
            on disk, and renamed back if the new one cannot be renamed.
    """
    sync(staging)
    old = aside if aside is not None and target.exists() else None
    if old is not None:
        target.rename(old)
    try:
        staging.rename(target)
    except OSError:
        if old is not None:
            old.rename(target)
        raise
    sync(target.parent)
    if old is not None:
        shutil.rmtree(old)


@contextlib.contextmanager
def staged_file(target: Path, *, durable: bool = True) -> Generator[Path]:
    """Yield the path at which the block writes a file that then becomes ``target``; after an error nothing is left.

    Args:
        target: replaced if it exists.
        durable: whether the file must survive a power loss; False for files that end with the job anyway.
    """
    staging = target.with_name(f".{target.name}.new")
    try:
        yield staging
        if durable:
            commit(staging, target)
        else:
            staging.rename(target)
    except BaseException:
        with contextlib.suppress(OSError):
            staging.unlink(missing_ok=True)
        raise
