# SPDX-License-Identifier: Apache-2.0
"""The files that a rank leaves in the job's temporary folder for its launcher: their names, and the notes among them.

Imported by the agent, which passes them to the ranks and reads them, and by code that runs in a rank.
"""

from __future__ import annotations

import contextlib
from pathlib import Path


def error_file(folder: str, attempt: int, rank: int) -> str:
    """Return the path a rank writes its failure to."""
    return str(Path(folder) / f"attempt-{attempt}-rank-{rank}.json")


def torch_error_file(folder: str, attempt: int, rank: int) -> str:
    """Return the path torch elastic's ``@record`` writes the same to."""
    return str(Path(folder) / f"torch-attempt-{attempt}-rank-{rank}.json")


def stack_file(folder: str, attempt: int, rank: int) -> str:
    """Return the path a rank writes its stack to on request."""
    return str(Path(folder) / f"stack-attempt-{attempt}-rank-{rank}.txt")


def alone_note(error_file: str) -> str:
    """Return the file that a rank creates if it trains without having joined its peers."""
    return str(Path(error_file).with_suffix(".alone"))


def script_end_note(error_file: str) -> str:
    """Return the file that a rank creates when its script has run to the end.

    From then on the script no longer keeps the process alive: exit handlers, threads and destructors run, without
    a line of the script in the stack.
    """
    return str(Path(error_file).with_suffix(".over"))


def note_script_end(error_file: str) -> None:
    """Record that the script of this rank has ended; a full disk must not keep a rank from exiting."""
    with contextlib.suppress(OSError):
        Path(script_end_note(error_file)).touch()
