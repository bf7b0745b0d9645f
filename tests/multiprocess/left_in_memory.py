# SPDX-License-Identifier: Apache-2.0
"""What ranks of a test left in memory. Tests of other processes come and go beside it, and are not looked at."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

NAMED = Path("/dev/shm")  # noqa: S108 - only looked at
MARK = "RANKWISE_TEST_RUN"
"""The variable that every process of this run of tests inherits; ``tests/conftest.py`` sets it."""
MEMORY = "/memfd:rankwise"
"""How the kernel shows the memory that ranks share."""
END_SECONDS = 5.0
"""How long a name may stay that another process's test made: those go by themselves, and what is left stays."""


def names() -> set[str]:
    """Return the names of all memory that has one; a folder is that of a host in ``tests/multihost``."""
    return {entry.name for entry in NAMED.iterdir() if entry.is_file()}


def names_left(before: set[str]) -> set[str]:
    """Return which names are there to stay that were not there before."""
    deadline = time.monotonic() + END_SECONDS
    while (left := names() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def held() -> list[str]:
    """Return what processes of this run map, or have open, of rankwise's memory. Without any, it is freed."""
    mark = f"{MARK}={os.environ[MARK]}\0".encode()
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        # A process may end while it is looked at, and the one that looks has opened the folder it looks at.
        with contextlib.suppress(OSError):
            # The variables that a process set itself are not shown.
            if process.name == str(os.getpid()) or mark in (process / "environ").read_bytes():
                found += [line for line in (process / "maps").read_text().splitlines() if MEMORY in line]
                for link in (process / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        found += [str(link)] * (MEMORY in str(link.readlink()))
    return found
