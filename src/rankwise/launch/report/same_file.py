# SPDX-License-Identifier: Apache-2.0
"""Several ranks that write one file: detected when the second one opens it, and reported once per job and machine.

Python reports opened files by audit events, torch.save by a hook. The files each rank has opened are recorded in the
job's temporary folder, as links named after the file whose target is the rank. Imported by the worker.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from rankwise.health.flight_recorder import FOR_OTHERS, responsible_module
from rankwise.log import warn

MOST_FILES = 10_000
"""How many files of one rank are tracked."""
_NOT_FILES = ("/dev/", "/proc/", "/sys/")
_LOCKS = (".lock", ".lck")
_MEANS = ("rankwise.launch.", "rankwise.torch_private.", "rankwise.health.flight_recorder")
"""Modules by which opened files are noticed."""


def watch(rank: int, error_file: str) -> None:
    """Track which files this process and its forks open for writing, beside the file for the rank's failure.

    Called by: each of several ranks, once, before its script runs.
    """
    from rankwise.torch_private.processes import on_save  # noqa: PLC0415 - imports torch

    opened = _Opened(rank, Path(error_file).parent, Path(error_file).name.partition("-rank-")[0])

    def look(event: str, args: tuple[object, ...]) -> None:
        # Called for every audit event of the process: the common case is this comparison.
        if event == "open" and isinstance(args[1], str) and "w" in args[1]:
            opened.note(args[0])

    on_save(opened.note)
    sys.addaudithook(look)


class _Opened:
    def __init__(self, rank: int, folder: Path, attempt: str) -> None:
        self._rank = rank
        self._job_folder = f"{folder}/"
        self._links = folder / f"{attempt}-written"
        self._seen: set[str] = set()
        self._is_looking = False

    def note(self, name: object) -> None:
        """Record that ``name`` is about to be opened. Never raises: that would be the script's error."""
        if self._is_looking or not isinstance(name, str | bytes | os.PathLike) or len(self._seen) >= MOST_FILES:
            return
        # The code below opens files itself if the user's logging does.
        self._is_looking = True
        try:
            self._look(os.fsdecode(name))
        except Exception:  # noqa: BLE001, S110 - a full disk, a path that cannot be resolved
            pass
        finally:
            self._is_looking = False

    def _look(self, name: str) -> None:
        path = os.path.realpath(name)
        if path in self._seen or not _counts(name, path) or path.startswith(self._job_folder) or _is_ours():
            return
        self._seen.add(path)
        self._links.mkdir(exist_ok=True)
        link = self._links / hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()
        if _is_made(link, self._rank):
            return
        other = int(os.readlink(link))  # noqa: PTH115 - text, not a path
        # One report per job, by the rank that creates this link.
        if other != self._rank and _is_made(self._links / "told", self._rank):
            first, second = sorted((self._rank, other))
            warn(
                f"ranks {first} and {second} have both opened {name} for writing and overwrite each other's "
                "data; write on one rank only (`if world.rank == 0:`), or add the rank to the name",
                all_ranks=True,
            )


def _is_made(link: Path, rank: int) -> bool:
    """Create a link that holds ``rank``; return whether it did not exist."""
    try:
        link.symlink_to(str(rank))
    except FileExistsError:
        return False
    return True


def _counts(name: str, path: str) -> bool:
    """Return whether a file would be corrupted if two ranks write it: not a device, lock or cache."""
    if name.startswith(_NOT_FILES) or path.startswith(_NOT_FILES) or path.endswith(_LOCKS):
        return False
    if os.path.lexists(path) and not Path(path).is_file():
        return False
    # Caches are in hidden folders, and libraries share them on purpose; the script's own folder may be in one.
    return not any(part.startswith(".") for part in Path(path.removeprefix(f"{Path.cwd()}/")).parts)


def _is_ours() -> bool:
    """Return whether rankwise opens the file: the nearest caller that does not open files for others."""
    return responsible_module(_MEANS, FOR_OTHERS | {"torch"}).startswith("rankwise.")
