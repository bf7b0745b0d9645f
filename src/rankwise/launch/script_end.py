# SPDX-License-Identifier: Apache-2.0
"""The note a rank leaves when its script has run to the end: what keeps its process from then on is not the script.

Exit handlers, threads and destructors run after it, without a line of the script in the stack. Imported by the worker,
which leaves the note, and by ``ranks``, which looks for it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path


def note_of(error_file: str) -> str:
    """Return the path of the note of a rank.

    Args:
        error_file: what the rank writes its failure to.
    """
    return str(Path(error_file).with_suffix(".over"))


def leave_note(error_file: str) -> None:
    """Note that the script of this rank is over; a full disk keeps no rank from ending."""
    with contextlib.suppress(OSError):
        Path(note_of(error_file)).touch()
