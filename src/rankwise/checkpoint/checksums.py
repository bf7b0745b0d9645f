# SPDX-License-Identifier: Apache-2.0
"""Files with checksums: written on disk piece by piece, and compared with the manifest.

Knows no tensors and no other rank.
"""

from __future__ import annotations

import stat
import zlib
from typing import TYPE_CHECKING

from rankwise.checkpoint.manifest import PIECE_BYTES, FileEntry
from rankwise.tensors.synced_folders import sync

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    Bytes = bytes | memoryview


def write_file(path: Path, parts: Iterable[Bytes]) -> FileEntry:
    """Write a new file from its parts, on disk when this returns; return its size and checksums.

    The interpreter lock is free while bytes are written and summed.
    """
    checksums: list[str] = []
    size, crc = 0, 0
    with path.open("xb") as file:
        for piece in _cut(parts):
            file.write(piece)
            crc = zlib.crc32(piece, crc)
            size += len(piece)
            if size % PIECE_BYTES == 0:
                checksums.append(f"{crc:08x}")
                crc = 0
        if size % PIECE_BYTES:
            checksums.append(f"{crc:08x}")
    sync(path)
    return FileEntry(name=path.name, size_bytes=size, checksums=tuple(checksums))


def _cut(parts: Iterable[Bytes]) -> Iterator[memoryview]:
    """Yield the bytes of ``parts`` so that no piece crosses a multiple of ``PIECE_BYTES``."""
    position = 0
    for part in parts:
        view = memoryview(part)
        while view:
            piece = view[: PIECE_BYTES - position % PIECE_BYTES]
            yield piece
            view = view[len(piece) :]
            position += len(piece)


def plain(path: Path) -> Path:
    """Return a path unless it is a pipe or a device, which ``open`` may block on.

    Raises:
        FileNotFoundError: nothing has this name.
        OSError: it is a pipe, a device, a folder or a link that leads nowhere, or cannot be looked at.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise OSError("it is a link to a file that does not exist here") from None
        raise
    if not stat.S_ISREG(mode):
        raise OSError("it is not a regular file")
    return path


def find_damage(path: Path, entry: FileEntry, pieces: Iterable[int]) -> str | None:
    """Return how a file is damaged, or ``None``: its size, and the checksums of some pieces by number.

    Raises:
        OSError: it cannot be read, so that nothing is known about its bytes.
    """
    try:
        found = plain(path).stat().st_size
        if found < entry.size_bytes:
            return f"{path.name} is truncated: {entry.size_bytes} bytes expected, {found} found"
        if found > entry.size_bytes:
            return f"{path.name} is too long: {entry.size_bytes} bytes expected, {found} found"
        buffer = memoryview(bytearray(min(PIECE_BYTES, entry.size_bytes)))
        with path.open("rb") as file:
            for number in pieces:
                length = min(PIECE_BYTES, entry.size_bytes - number * PIECE_BYTES)
                file.seek(number * PIECE_BYTES)
                if file.readinto(buffer[:length]) < length:
                    raise OSError("the file ended early")
                if f"{zlib.crc32(buffer[:length]):08x}" != entry.checksums[number]:
                    first = number * PIECE_BYTES
                    where = f"bytes {first}-{first + length - 1}"
                    return f"{path.name} is damaged: its checksum differs in {where}"
    except FileNotFoundError:
        return f"{path.name} is missing"
    return None
