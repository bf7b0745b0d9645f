# SPDX-License-Identifier: Apache-2.0
"""What earlier saves have left in a folder of checkpoints, as all ranks see it, and which of them a restart continues.

Reads no checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.checkpoint import folder
from rankwise.errors import CheckpointError, fold_values
from rankwise.log import warn
from rankwise.tensors.synced_folders import make_folder, staged_file
from rankwise.world.environments.process import job_of_process, stack_file

if TYPE_CHECKING:
    from rankwise.checkpoint.phases import CheckpointRanks

FRESH = ".rankwise-fresh"
"""The file that says which checkpoints a job ignores, so that its restarts ignore no others."""


def numbers_on_ranks(ranks: CheckpointRanks, directory: Path) -> list[int]:
    """Return the numbers of the checkpoints, newest first, the same on every rank; warn about unfinished saves.

    Called by: every rank.

    Raises:
        CheckpointError: a rank cannot list the folder, or ranks see different ones; on every rank.
    """

    def look() -> list[Any]:
        try:
            unfinished = [path.name for path in folder.list_unfinished(directory)]
            return [list(folder.list_numbered(directory)), unfinished, None]
        except OSError as error:
            return [[], [], str(error)]

    reports = ranks.confirm(f"listing {directory}", look)
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
