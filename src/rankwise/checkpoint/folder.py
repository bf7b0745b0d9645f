# SPDX-License-Identifier: Apache-2.0
"""A folder of checkpoints: the names in it, how one is created, replaced and removed, and what earlier saves have left.

Every change a reader can see is one rename. Reads no checkpoint; rank zero alone changes a folder. All saved state
(checkpoints, weights, snapshots of servers; elastic commits, without the sync) is written by the functions at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.checkpoint.manifest import MANIFEST_NAME
from rankwise.errors import CheckpointError, ConfigurationError, fold_values
from rankwise.log import warn
from rankwise.world.environments.process import job_of_process, stack_file

if TYPE_CHECKING:
    from collections.abc import Generator

    from rankwise.comm.agreement import CheckpointRanks

PREFIX = "checkpoint-"
FRESH = ".rankwise-fresh"
"""The file that says which checkpoints a job ignores, so that its restarts ignore no others."""

_NUMBERED = re.compile(re.escape(PREFIX) + r"(\d{6,})")
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<state>staging|replaced|removed)-[0-9a-f]{16}")


def checkpoint_name(number: int) -> str:
    """Return the name of a numbered checkpoint; names sort as numbers do, up to 999999."""
    return f"{PREFIX}{number:06d}"


def staging_path(target: Path, token: str) -> Path:
    """Return where a checkpoint is written before it is complete: next to ``target``, with the token of the save."""
    return target.with_name(f".{target.name}.staging-{token}")


def path_of(path: object, *, call: str, of: str = "file", do: str = "") -> Path:
    """Return the user's argument as a path. ``do`` is the call as it should be.

    Raises:
        ConfigurationError: it is not a path.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise ConfigurationError(
            f"The first argument of {call} must be the path of a {of}, got a {type(path).__name__}.",
            do=do or f'pass the path, then the model: {call.removesuffix("()")}("model.safetensors", model)',
        )
    return Path(os.fspath(path))


def find(target: Path) -> Path:
    """Return the path of the complete checkpoint ``target``: another one if the process died while replacing it."""
    # An error of the disk is reported where the checkpoint is read.
    with contextlib.suppress(OSError):
        if not target.exists():
            for path, name, state in _listed(target.parent)[1]:
                if (name, state) == (target.name, "replaced"):
                    return path
    return target


def list_numbered(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a folder by number, newest first; none if it does not exist.

    Raises:
        OSError: it cannot be listed, so that it is not known whether there are any.
    """
    names, hidden = _listed(folder)
    path_of = {name: path for path, name, state in reversed(hidden) if state == "replaced"}
    path_of.update(zip(names, map(folder.joinpath, names), strict=True))
    numbered = [(int(match[1]), path_of[match[0]]) for match in map(_NUMBERED.fullmatch, path_of) if match]
    return dict(sorted(numbered, reverse=True))


def _unfinished(folder: Path) -> list[str]:
    """Return the names of directories that interrupted saves of numbered checkpoints have left."""
    hidden = _listed(folder)[1]
    return [path.name for path, name, state in hidden if state == "staging" and _NUMBERED.fullmatch(name)]


def remove_leftovers(folder: Path, name: str | None) -> None:
    """Remove what interrupted saves have left; bring back a checkpoint whose replacement was interrupted.

    No save may be running there.

    Args:
        folder: where to look.
        name: of one checkpoint; ``None`` for all numbered checkpoints.
    """
    for path, own, state in _listed(folder)[1]:
        is_meant = own == name if name is not None else _NUMBERED.fullmatch(own) is not None
        if not is_meant:
            continue
        if state == "replaced" and not (folder / own).exists():
            path.rename(folder / own)
        else:
            shutil.rmtree(path)


def refuse_foreign(target: Path) -> None:
    """Raise unless ``target`` may be replaced: it does not exist, is empty, or is a checkpoint."""
    if not target.exists() and not target.is_symlink():
        return
    if target.is_dir() and not target.is_symlink():
        names = [path.name for path in target.iterdir()]
        if not names or MANIFEST_NAME in names:
            return
    raise CheckpointError(
        f"{target} already exists and is not a checkpoint.",
        evidence="nothing was written",
        do="use a directory that does not exist yet, or remove this one",
    )


def remove(path: Path, token: str) -> None:
    """Remove a checkpoint; a crash on the way leaves nothing that looks like one."""
    hidden = path.with_name(f".{path.name}.removed-{token}")
    path.rename(hidden)
    shutil.rmtree(hidden)


def _listed(folder: Path) -> tuple[list[str], list[tuple[Path, str, str]]]:
    """Return the names in a folder; and the directories that saves hide, each with the checkpoint's name and its state.

    Raises:
        OSError: it cannot be listed.
    """
    try:
        names = sorted(map(attrgetter("name"), folder.iterdir()))
    except FileNotFoundError:
        # Such as the place of a disk that is not mounted: a folder made there would be another one.
        for path in (folder, *folder.parents):
            if path.is_symlink() and not path.exists():
                raise OSError(f"{path} is a link to {path.readlink()}, which does not exist here") from None
        return [], []
    hidden: list[tuple[Path, str, str]] = []
    for match in filter(None, map(_HIDDEN.fullmatch, names)):
        path = folder / match[0]
        if path.is_dir():
            hidden.append((path, match["name"], match["state"]))
    return names, hidden


# -- as all ranks see it -----------------------------------------------------------------------------


def numbers_on_ranks(ranks: CheckpointRanks, directory: Path) -> list[int]:
    """Return the numbers of the checkpoints, newest first, the same on every rank; warn about unfinished saves.

    Called by: every rank.

    Raises:
        CheckpointError: a rank cannot list the folder, or ranks see different ones; on every rank.
    """

    def list_folder() -> list[Any]:
        try:
            return [list(list_numbered(directory)), _unfinished(directory), None]
        except OSError as error:
            return [[], [], str(error)]

    reports = ranks.confirm(f"listing {directory}", list_folder)
    errors = {rank: error for rank, (_, _, error) in enumerate(reports) if error is not None}
    if errors:
        raise CheckpointError(
            f"The folder of checkpoints {directory} cannot be read.",
            evidence=fold_values(errors),
            do="check the disk and the permissions on every machine, then try again; or use another folder",
        )
    found, unfinished, _ = reports[0]
    # Ranks may look before and after another job saves: only folders that have nothing in common are different ones.
    if any(numbers and set(numbers).isdisjoint(found) for numbers, _, _ in reports):
        seen = {rank: ", ".join(map(str, numbers)) or "none" for rank, (numbers, _, _) in enumerate(reports)}
        raise CheckpointError(
            f"Ranks see different checkpoints in {directory}.",
            evidence=fold_values(seen),
            do="use a folder on a file system that every rank sees, and check that it is mounted on every machine",
        )
    for name in unfinished:
        warn(f"skipping {directory / name}: it is an unfinished save")
    return list(found)


def newest_to_ignore(ranks: CheckpointRanks, directory: Path, numbers: list[int]) -> int:
    """Return the newest checkpoint that is not of this job; -1 if there is none. Called by: every rank."""

    def choose() -> int:
        newest, (job, _) = max(numbers, default=-1), job_of_process()
        note = directory / FRESH
        if ranks.rank > 0 or not job:
            return newest
        noted = json.loads(note.read_bytes()) if note.exists() else {}
        if noted.get("job") == job:
            return int(noted["newest"])
        make_folder(directory)
        with staged_file(note) as staging:
            staging.write_text(json.dumps({"job": job, "newest": newest}), encoding="utf-8")
        return newest

    return ranks.confirm("choosing the checkpoints to ignore", choose)[0]


def note_use(directory: Path) -> None:
    """Note, in the launcher's temporary folder, that this job has a checkpoint in ``directory``."""
    note = _note_of(directory)
    if note is not None:
        # Without the note, a restart does not notice that the folder has been removed.
        with contextlib.suppress(OSError):
            note.touch()


def were_here(ranks: CheckpointRanks, directory: Path) -> bool:
    """Return whether an earlier attempt of this job had a checkpoint in ``directory``. Called by: every rank."""
    note = _note_of(directory)
    is_noted = note is not None and job_of_process()[1] > 0 and note.exists()
    return any(ranks.confirm("looking for an earlier save of this job", lambda: is_noted))


def _note_of(directory: Path) -> Path | None:
    of_job = stack_file()
    name = f"checkpoints-{hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]}"
    return Path(of_job).with_name(name) if of_job else None


# -- saved state that is complete under its name or absent, also after a power loss: write, sync, rename, sync

# POSIX guarantees only what fsync was called for: of a file its bytes, of a folder its names.


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


def commit(staging: Path, target: Path, token: str | None = None) -> None:
    """Rename ``staging`` to ``target``; on disk when this returns.

    Args:
        staging: a file, or a folder whose files are on disk already.
        target: next to it. A file that is there is replaced.
        token: of the save of a folder. A folder that is there is first renamed, since a rename cannot replace it;
            removed once the new one is on disk, and renamed back if the new one cannot be renamed.
    """
    sync(staging)
    old = None
    if token is not None and target.exists():
        old = target.with_name(f".{target.name}.replaced-{token}")
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
