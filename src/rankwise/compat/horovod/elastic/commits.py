# SPDX-License-Identifier: Apache-2.0
"""Commits that outlive a rank's process: files in the launcher's temporary folder, written once per machine.

The folder is private to this user and is removed when the launcher exits, so commits are not synced to disk: that would
help only after a power loss, which ends the launcher too. Files are read without running code.
"""

from __future__ import annotations

import _codecs
import io
import itertools
import pickle
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from rankwise.checkpoint.folder import staged_file
from rankwise.comm.collectives import broadcast_object, gather_json
from rankwise.comm.session import current
from rankwise.errors import CheckpointError, ConfigurationError, fold_values
from rankwise.log import log, warn
from rankwise.world.environments.process import read_process, stack_file

NUM_KEPT = 2
"""The newest, and the one before it in case the newest is damaged."""
_OF_NUMPY: list[Any] = [
    np.ndarray,
    np.dtype,
    *(type(np.dtype(code)) for code in "?bhilqBHILQefdgFDG"),
    np.float64(0).__reduce__()[0],
    np.empty(0).__reduce__()[0],
    _codecs.encode,
]
"""The functions that read back numbers and arrays of NumPy; none of them runs code from a file."""
_NAME = re.compile(r"elastic-(\d+)-(\d+)-(\d+)\.pt")


class CommitNumber(NamedTuple):
    """Identifies a commit of a state; later attempts have the newer commits."""

    attempt: int
    number: int


class Commits:
    """The commits of one state, from its :func:`run` on, in the folder of this machine's part of the job.

    ``run`` numbers the calls of ``elastic.run`` in this process, alike on every rank and in every attempt.
    """

    def __init__(self, folder: Path, *, run: int, attempt: int, is_writer: bool) -> None:
        self._folder = folder
        self._run = run
        self._attempt = attempt
        self._is_writer = is_writer
        self._num_written = 0

    @property
    def is_later_attempt(self) -> bool:
        """Whether an earlier attempt of this job may have written commits."""
        return self._attempt > 0

    def write(self, kept: dict[str, Any] | None) -> None:
        """Write a commit completely or not at all. Called by: every rank; one per machine writes."""
        self._num_written += 1
        if kept is None or not self._is_writer:
            return
        path = self._folder / f"elastic-{self._run}-{self._attempt}-{self._num_written}.pt"
        try:
            with staged_file(path, durable=False) as staging:
                _save(kept, staging, is_first=self._num_written == 1)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"The elastic state cannot be committed to {self._folder}: {error}",
                do="make room there, or set TMPDIR to another folder before `rankwise run`",
            ) from error
        for old in self._found()[NUM_KEPT:]:
            self._path(old).unlink(missing_ok=True)

    def take_newest(self) -> dict[str, Any] | None:
        """Return the newest undamaged commit of all machines; ``None`` if there is none.

        Called by: every rank, at the start of an attempt that is not the first.

        Raises:
            CheckpointError: there are commits, and all are damaged, or the newest cannot be read; on every rank.
        """
        own, unread, text = self._newest_readable() if self._is_writer else (None, None, "")
        reported = gather_json([None if own is None else own[0], unread, text], what="hvd.elastic.run()")
        marks = {rank: CommitNumber(*mark) for rank, (mark, _, _) in enumerate(reported) if mark is not None}
        newest = max(marks.values(), default=None)
        lost = {
            rank: text
            for rank, (_, unread, text) in enumerate(reported)
            if text and (newest is None or (unread is not None and CommitNumber(*unread) > newest))
        }
        if lost:
            raise CheckpointError(
                "This attempt cannot continue from the elastic state that an earlier one has committed.",
                evidence=fold_values(lost),
                do="check the disk of the job's temporary folder, and start the job again; "
                "TMPDIR=... rankwise run puts the folder on another disk",
            )
        if not marks:
            return None
        # If several ranks have it, the lowest one sends it.
        source = max(marks, key=lambda rank: (marks[rank], -rank))
        log(f"elastic: commit {marks[source].number} of attempt {marks[source].attempt} is restored from rank {source}")
        data = own[1] if own is not None and source == current().world.rank else b""
        return _loaded(broadcast_object(data, source))

    def _newest_readable(self) -> tuple[tuple[CommitNumber, bytes] | None, CommitNumber | None, str]:
        """Return this machine's newest undamaged commit, the newest that cannot be read, and the reasons."""
        unread: CommitNumber | None = None
        reasons: list[str] = []
        for mark in self._found():
            try:
                data = self._path(mark).read_bytes()
                _loaded(data)
            except Exception as error:  # noqa: BLE001 - torch raises many kinds for a damaged file
                reasons.append(f"{self._path(mark)}: {str(error).partition(chr(10))[0]}")
                warn(f"the elastic commit {reasons[-1].replace(': ', ' is skipped: ', 1)}", all_ranks=True)
                unread = unread or (mark if isinstance(error, OSError) else None)
                continue
            return (mark, data), unread, "\n".join(reasons)
        return None, unread, "\n".join(reasons)

    def _found(self) -> list[CommitNumber]:
        """Return the commits of this run that the folder holds, the newest first."""
        names = [_NAME.fullmatch(path.name) for path in self._folder.iterdir()]
        marks = [CommitNumber(int(name[2]), int(name[3])) for name in names if name and int(name[1]) == self._run]
        return sorted(marks, reverse=True)

    def _path(self, mark: CommitNumber) -> Path:
        return self._folder / f"elastic-{self._run}-{mark.attempt}-{mark.number}.pt"


_run_numbers = itertools.count()


def open_commits() -> Commits | None:
    """Return the commits of the next ``elastic.run``; ``None`` if no launcher would restart this job.

    Called by: every rank, once for each ``elastic.run``.
    """
    run = next(_run_numbers)
    in_folder_of_job = stack_file()
    if not in_folder_of_job:
        return None
    attempt = int(read_process().attempt)
    is_writer = current().world.local_rank == 0
    return Commits(Path(in_folder_of_job).parent, run=run, attempt=attempt, is_writer=is_writer)


def _loaded(data: bytes) -> dict[str, Any]:
    # Tensors are loaded on the CPU; load_state_dict() copies them to the model's device.
    with safe_globals(_OF_NUMPY):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _save(kept: dict[str, Any], path: Path, *, is_first: bool) -> None:
    """Write a commit; raise a ConfigurationError if it cannot be read back without running code."""
    try:
        torch.save(kept, path)
        with safe_globals(_OF_NUMPY):
            found = get_unsafe_globals_in_checkpoint(path)
        if not found and is_first:
            _loaded(path.read_bytes())  # once: later commits hold the same types
    except (pickle.PickleError, AttributeError, TypeError) as error:
        found = [str(error).partition("\n")[0]]
    if found:
        raise ConfigurationError(
            "The elastic state contains objects that cannot be read back without running code.",
            evidence="\n".join(sorted(found)),
            do="keep tensors, arrays, numbers, strings, and lists, sets and dicts of them; for a class of your own, "
            "keep its fields, or allow it with torch.serialization.add_safe_globals([Class])",
        )
