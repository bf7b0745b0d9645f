# SPDX-License-Identifier: Apache-2.0
"""A copy of the user's folder for one run, so that no run sees the files of another or overwrites the user's.

Large files are linked; ``recorder`` replaces a link by a copy when the script writes to it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

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


def copy_folder(folder: Path, copy: Path) -> None:
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
            _check(folder, copied_bytes, num_files)
            shutil.copy2(file, there / name)


def _check(folder: Path, copied_bytes: int, num_files: int) -> None:
    if copied_bytes > MOST_BYTES or num_files > MOST_FILES:
        raise ConfigurationError(
            f"The working folder {folder} holds too much to copy for each run.",
            evidence=f"more than {MOST_FILES} files or {MOST_BYTES // 2**30} GiB of files and checkpoints",
            do="run verify in a folder that holds the script and what it needs; data may be elsewhere",
        )
