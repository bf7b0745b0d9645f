# SPDX-License-Identifier: Apache-2.0
"""Copies of the user's folders, so that no run sees the files of another or overwrites the user's; and their lines.

Large files are linked; ``recorder`` replaces a link by a copy when the script writes to it.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

LARGE_BYTES = 8 * 2**20
"""From this size on a file is linked, unless it is one of ``WRITTEN``."""
MOST_BYTES = 2**30
"""Of all files that are copied."""
MOST_FILES = 20_000
WRITTEN = (".pt", ".pth", ".ckpt", ".safetensors", ".npz", ".npy", ".pkl", ".bin", ".h5", ".tar")
"""Checkpoints: written by ways that cannot be followed, so they are always copied."""
PREFIX = "rankwise-verify-"
"""How the name of a folder of copies begins."""
_LEFT_OUT = {"__pycache__", ".git", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
_LIBRARIES = ("site-packages", "dist-packages")
_LINKED = {".venv", "venv", "node_modules", ".tox"}


@dataclass(frozen=True, slots=True)
class Copies:
    """The copies of the user's folders that one run works in."""

    working_folder: Path
    root: Path
    """The folder that holds all copies."""
    target: str
    """The script in its copy, or the module."""

    @classmethod
    def of(cls, target: str, to: Path, *, is_module: bool) -> Self:
        """Copy the working folder to a new folder, and the script's own if it is elsewhere."""
        here = Path.cwd()
        copy = to / here.name
        _copy_folder(here, copy)
        if is_module or not Path(target).absolute().is_file():
            return cls(copy, copy, target)
        path = Path(os.path.normpath(Path(target).absolute()))
        if path.is_relative_to(here):
            return cls(copy, copy, str(path.relative_to(here)))
        other = to / "script" / path.parent.name
        _copy_folder(path.parent, other)
        return cls(copy, to, str(other / path.name))


def copy_of_link(path: Path, root: str) -> None:
    """Replace a link to one of the user's large files by a copy, before the script writes to it."""
    if path.is_symlink() and str(path).startswith(root):
        content = path.resolve()
        path.unlink()
        if content.is_file():
            path.write_bytes(content.read_bytes())


def _copy_folder(folder: Path, copy: Path) -> None:
    """Copy ``folder`` to ``copy``, which does not exist.

    Raises:
        ConfigurationError: it holds too much to copy.
    """
    copied_bytes = num_files = 0
    for place, folders, files in os.walk(folder):
        here = Path(place)
        there = copy / here.relative_to(folder)
        there.mkdir(parents=True, exist_ok=True)
        for name in list(folders):
            inner = here / name
            if inner.is_symlink() or name in _LINKED:
                (there / name).symlink_to(inner.resolve())
            # Folders for temporary files may lie in the working folder.
            if inner.is_symlink() or name in _LINKED or name in _LEFT_OUT or name.startswith(PREFIX):
                folders.remove(name)
        for name in files:
            file = here / name
            if not file.is_file():
                continue
            num_files += 1
            size = file.stat().st_size
            if size >= LARGE_BYTES and file.suffix not in WRITTEN:
                (there / name).symlink_to(file.resolve())
                continue
            copied_bytes += size
            if copied_bytes > MOST_BYTES or num_files > MOST_FILES:
                raise ConfigurationError(
                    f"The working folder {folder} holds too much to copy for each run.",
                    evidence=f"more than {MOST_FILES} files or {MOST_BYTES // 2**30} GiB of files and checkpoints",
                    do="run verify in a folder that holds the script and what it needs; data may be elsewhere",
                )
            shutil.copy2(file, there / name)


# -- lines of the script -------------------------------------------------------------------------------------


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
