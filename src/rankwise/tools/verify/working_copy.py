# SPDX-License-Identifier: Apache-2.0
"""A copy of the user's folder for one run, so that no run sees the files of another or overwrites the user's.

Large files are linked; ``recorder`` replaces a link by a copy when the script writes to it.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rankwise.errors import ConfigurationError

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
