# SPDX-License-Identifier: Apache-2.0
"""The collective that a rank has begun last, kept in a file that outlives its process: where it was when it was killed.

The file is mapped into memory, so that a note takes about a microsecond and the kernel keeps it whatever ends the
process. Imported by record, which writes, and by the launcher, which reads.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from pathlib import Path

_HEADER = struct.Struct("<dI")
"""When the collective began, in seconds since the epoch; how many bytes of text follow."""
LENGTH_BYTES = 1024


class LastCall:
    """The writing end, for as long as the rank lives.

    Args:
        path: the file, which is made.

    Raises:
        OSError: it cannot be made, or its disk is full.
    """

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # A page that the disk has no room for would end the process by SIGBUS.
            os.posix_fallocate(descriptor, 0, LENGTH_BYTES)
            self._memory = mmap.mmap(descriptor, LENGTH_BYTES)
        finally:
            os.close(descriptor)

    def note(self, words: bytes) -> None:
        """Keep what begins now."""
        words = words[: LENGTH_BYTES - _HEADER.size]
        self._memory[: _HEADER.size + len(words)] = _HEADER.pack(time.time(), len(words)) + words


def opened(path: str) -> LastCall | None:
    """Return the writing end, or ``None`` where there is no path, or no room: a rank trains without, too."""
    with contextlib.suppress(OSError):
        return LastCall(path) if path else None
    return None


def path_beside(stack_file: str) -> str:
    """Return where a rank keeps its last collective, from where it writes its stack; empty where it does not."""
    return f"{stack_file}.last" if stack_file else ""


def read(path: str, when: float) -> str:
    """Return in words what a rank that has ended had begun last; empty where it noted nothing.

    Args:
        path: of its file.
        when: it ended, in seconds since the epoch.
    """
    try:
        data = Path(path).read_bytes()
        since, length = _HEADER.unpack_from(data)
    except (OSError, struct.error):
        return ""
    words = data[_HEADER.size : _HEADER.size + length].decode("utf-8", "replace")
    return f"in or after {words}, begun {max(0.0, when - since):.1f} s before its end" if words else ""
