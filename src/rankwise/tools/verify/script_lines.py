# SPDX-License-Identifier: Apache-2.0
"""Which lines of the script are running, or raised an error. Imported by ``recorder``."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_LIBRARIES = ("site-packages", "dist-packages")


class ScriptLines:
    """The lines of the files in one folder; a line is ``train.py:31``, or empty if it is in no file of the folder."""

    def __init__(self, folder: str) -> None:
        self.root = f"{Path(folder).resolve()}{os.sep}"

    def within(self, path: str) -> str:
        """Return the path of a file relative to the folder; empty if it is elsewhere."""
        return path.removeprefix(self.root) if path.startswith(self.root) else ""

    def of(self, frame: FrameType, number: int) -> str:
        """Return a line of the function of a frame."""
        name = self.within(frame.f_code.co_filename)
        return f"{name}:{number}" if name and not any(word in name for word in _LIBRARIES) else ""

    def frames(self) -> Iterator[FrameType]:
        """Yield the functions that are running, the innermost first."""
        frame = sys._getframe(1)  # noqa: SLF001 - public in all but name
        while frame is not None:
            if self.of(frame, frame.f_lineno):
                yield frame
            frame = frame.f_back

    def running(self) -> str:
        """Return the innermost line that is running."""
        return next((self.of(frame, frame.f_lineno) for frame in self.frames()), "")

    def of_error(self, error: BaseException) -> str:
        """Return the innermost line in the traceback of an error, or of what caused it."""
        causes = self.of_error(error.__cause__) if error.__cause__ is not None else ""
        lines = [self.of(frame, number) for frame, number in traceback.walk_tb(error.__traceback__)]
        return causes or next((line for line in reversed(lines) if line), "")


def missing_file(error: BaseException, here: Path, origin: str) -> str:
    """Return the file or folder whose absence raised an error, if only the user's folder has it next to it.

    Args:
        error: what ended the script.
        here: the copy of the user's folder that it ran in.
        origin: the user's folder.
    """
    named: list[str] = []
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, str | bytes):
        named = [os.fsdecode(error.filename)]
    elif isinstance(error, ModuleNotFoundError) and error.name:
        named = [str(Path(folder, f"{error.name}{end}")) for folder in sys.path for end in ("", ".py")]
    beside = [os.path.relpath(here / one, here) for one in named]
    found = [one for one in beside if one.startswith("..") and Path(origin, one).exists()]
    causes = error.__cause__
    return found[0] if found else missing_file(causes, here, origin) if causes is not None else ""
