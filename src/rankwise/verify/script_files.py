# SPDX-License-Identifier: Apache-2.0
"""Copies of the user's folders, so that no run sees the files of another or overwrites the user's; and their lines.

Large files are linked; a link is replaced by a copy when the script writes to it.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rankwise.errors import ConfigurationError
from rankwise.torch_private.processes import on_save
from rankwise.verify.records import Written

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from types import FrameType

LARGE_BYTES = 8 * 2**20
"""From this size on a file is linked, unless it is one of ``WRITTEN``."""
MOST_BYTES = 2**30
"""Of all files that are copied."""
MOST_FILES = 20_000
MOST_NOTED = 1000
"""Files that the script writes."""
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


def _copy_link(path: Path, root: str) -> None:
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


class FileNotes:
    """Notes which files the script writes, and which state it read last.

    Args:
        lines: of the script.
        on_written: receives each file that a line of the script writes first.
    """

    def __init__(self, lines: ScriptLines, on_written: Callable[[Written], None]) -> None:
        self._lines = lines
        self._on_written = on_written
        self._noted: set[str] = set()
        self._is_paused = False
        self.here = Path.cwd()
        self.last_read = ""

    def install(self) -> None:
        """Follow the opening of files from now on."""
        on_save(self._note)
        sys.addaudithook(self._audit)

    @contextmanager
    def paused(self) -> Generator[None]:
        """Note no written file inside the block."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _audit(self, event: str, args: tuple[object, ...]) -> None:
        if event == "open" and isinstance(args[1], str) and any(letter in args[1] for letter in "wax+"):
            self._note(args[0])
        elif event == "open" and isinstance(args[0], str | bytes) and os.fsdecode(args[0]).endswith(WRITTEN):
            self.last_read = os.path.relpath(os.fsdecode(args[0]), self.here)

    def _note(self, name: object) -> None:
        if self._is_paused or not isinstance(name, str | bytes | os.PathLike):
            return
        with self.paused(), suppress(OSError):
            given = Path(os.fsdecode(name)).absolute()
            _copy_link(given, self._lines.root)
            shown = self._lines.within(str(given.resolve()))
            line = self._lines.running()
            if shown and shown not in self._noted and line and len(self._noted) < MOST_NOTED:
                self._noted.add(shown)
                if not any(part.startswith((".", "__")) for part in Path(shown).parts):
                    self._on_written(Written(shown, line))


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
    next_to_it = [os.path.relpath(here / one, here) for one in named]
    found = [one for one in next_to_it if one.startswith("..") and Path(origin, one).exists()]
    causes = error.__cause__
    return found[0] if found else missing_file(causes, here, origin) if causes is not None else ""
