# SPDX-License-Identifier: Apache-2.0
"""The files that a rank leaves in the job's temporary folder for its launcher: their names, and the notes among them.

Imported by the agent, which names them to the ranks and reads them, and by what runs in a rank.
"""

from __future__ import annotations

import contextlib
from pathlib import Path


def error_file(folder: str, attempt: int, rank: int) -> str:
    """Return where a rank writes how it failed."""
    return str(Path(folder) / f"attempt-{attempt}-rank-{rank}.json")


def torch_error_file(folder: str, attempt: int, rank: int) -> str:
    """Return where torch elastic's ``@record`` writes the same."""
    return str(Path(folder) / f"torch-attempt-{attempt}-rank-{rank}.json")


def stack_file(folder: str, attempt: int, rank: int) -> str:
    """Return where a rank writes its stack when it is asked for it."""
    return str(Path(folder) / f"stack-attempt-{attempt}-rank-{rank}.txt")


def alone_note(error_file: str) -> str:
    """Return what a rank makes that trains without having joined its peers."""
    return str(Path(error_file).with_suffix(".alone"))


def script_end_note(error_file: str) -> str:
    """Return what a rank makes when its script has run to the end.

    What keeps its process from then on is not the script: exit handlers, threads and destructors run after it, without
    a line of the script in the stack.
    """
    return str(Path(error_file).with_suffix(".over"))


def note_script_end(error_file: str) -> None:
    """Note that the script of this rank is over; a full disk keeps no rank from exiting."""
    with contextlib.suppress(OSError):
        Path(script_end_note(error_file)).touch()
