# SPDX-License-Identifier: Apache-2.0
"""Files with checksums, and the tensors in them: their header and bytes, and reading regions of them.

Also the memory that a save in the background copies tensors into. Knows the safetensors layout and no other rank.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import stat
import struct
import zipfile
import zlib
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import safetensors
import torch

from rankwise.checkpoint.folder import sync
from rankwise.checkpoint.manifest import MANIFEST_NAME, PIECE_BYTES, FileEntry
from rankwise.errors import CheckpointError
from rankwise.tensors.files import CODES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from rankwise.checkpoint.manifest import Region, TensorEntry, TensorPart

    Bytes = bytes | memoryview

TRY_AGAIN = "check the path, the disk and the permissions on every machine, then try again"

_PARTS_OF_COMPLEX = {"complex64": "float32", "complex128": "float64"}
"""The format does not have all of these: they are written as [..., 2], real and imaginary."""


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as the manifest names it: ``"float32"``."""
    return str(dtype).removeprefix("torch.")


@cache
def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name in the manifest.

    Raises:
        CheckpointError: this torch has no dtype of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"The checkpoint holds tensors of dtype {name!r}, which this torch does not have.",
            do="load it with the torch version that wrote it",
        )
    return dtype


def in_file_order(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors in the order of their file: widest elements first, so all are aligned."""
    return {name: tensors[name] for _, name in sorted([(-one.element_size(), name) for name, one in tensors.items()])}


def header_of(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the first bytes of a file that holds ``tensors`` in this order. As :func:`header`."""
    return header({name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()})


def header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the first bytes of a file that holds tensors of these dtypes and shapes, in this order.

    Source: the safetensors format: the header's length as 8 bytes, little end first, then the header in JSON padded
        with spaces to a multiple of 8 bytes, then the bytes of the tensors without gaps.
    """
    fields: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        if dtype in _PARTS_OF_COMPLEX:
            dtype, shape = _PARTS_OF_COMPLEX[dtype], (*shape, 2)  # noqa: PLW2901 - as it lies in the file
        end = offset + dtype_of(dtype).itemsize * math.prod(shape)
        fields[name] = {"dtype": CODES[dtype_of(dtype)], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class StagingMemory:
    """Memory that a save copies tensors into, kept from one save to the next."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def reserve(self, size_bytes: int, *, pinned: bool) -> torch.Tensor:
        """Return uint8[size_bytes]; the memory of the last call if that is large enough.

        ``pinned`` memory is page-locked, so that copies from a GPU run in the background.
        """
        memory = self._memory
        if memory is None or memory.numel() < size_bytes or memory.is_pinned() != pinned:
            # Freed before the new one is allocated: both at once might not fit.
            self._memory = memory = None
            pages = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) if pinned else _shared(size_bytes)
            self._memory = memory = pages
        return memory[:size_bytes]

    def release(self) -> None:
        """Free the memory."""
        self._memory = None


def _shared(size_bytes: int) -> torch.Tensor:
    # Private memory is copied page by page at the first write after a fork, and data loader
    # workers are forked every epoch: snapshots then took 50 times as long. Shared memory is not.
    if size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)


def copy_into(memory: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors one after another into ``memory``, a uint8 tensor; does not wait for GPUs."""
    offset = 0
    for tensor in tensors.values():
        if tensor.nbytes:
            part = memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            part.copy_(tensor.detach(), non_blocking=True)
        offset += tensor.nbytes


def read_regions(folder: Path, wanted: Sequence[tuple[TensorEntry, Region]]) -> list[torch.Tensor]:
    """Return regions of tensors, on the CPU, in memory of their own. Nothing else of the files is read.

    Raises:
        CheckpointError: a file does not match the manifest.

    Source: safetensors.safe_open, which maps a file: only the pages that are copied from are read.
    """
    results = [torch.empty(region.shape, dtype=dtype_of(entry.dtype)) for entry, region in wanted]
    # Where each part of a file goes: which result, where in it, and from where in the part.
    ways: dict[str, list[tuple[int, TensorPart, Region]]] = {}
    for number, (entry, region) in enumerate(wanted):
        for part in entry.parts:
            if (common := region.common(part.region)) is not None:
                ways.setdefault(part.file, []).append((number, part, common))
    for file in sorted(ways):
        try:
            with cast("Any", safetensors).safe_open(folder / file, framework="pt") as opened:
                for number, part, common in ways[file]:
                    entry, region = wanted[number]
                    source = _checked(part, opened.get_tensor(part.name), entry.dtype)
                    # Complex numbers as they lie in the file: the map need not be aligned for whole ones.
                    result = torch.view_as_real(results[number]) if results[number].is_complex() else results[number]
                    result[common.within(region)] = source[common.within(part.region)]
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(f"{folder / file} cannot be read: {error}", do="load another checkpoint") from error
    return results


def _checked(part: TensorPart, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    found = dtype_name(tensor.dtype), tuple(tensor.shape)
    shape = (*part.region.shape, 2) if dtype in _PARTS_OF_COMPLEX else part.region.shape
    if found != (_PARTS_OF_COMPLEX.get(dtype, dtype), shape):
        raise CheckpointError(
            f"{part.file} and the manifest disagree about {part.name}.",
            evidence=f"manifest: {dtype}{list(part.region.shape)}\nfile: {found[0]}{list(found[1])}",
            do="load another checkpoint",
        )
    return tensor


# -- checksums ---------------------------------------------------------------------------------------


def write_file(path: Path, parts: Iterable[Bytes]) -> FileEntry:
    """Write a new file from its parts, on disk when this returns; return its size and checksums.

    The interpreter lock is free while bytes are written and summed.
    """
    checksums: list[str] = []
    size, crc = 0, 0
    with path.open("xb") as file:
        for part in parts:
            view = memoryview(part)
            while view:
                piece = view[: PIECE_BYTES - size % PIECE_BYTES]
                file.write(piece)
                crc = zlib.crc32(piece, crc)
                size += len(piece)
                if size % PIECE_BYTES == 0:
                    checksums.append(f"{crc:08x}")
                    crc = 0
                view = view[len(piece) :]
        if size % PIECE_BYTES:
            checksums.append(f"{crc:08x}")
    sync(path)
    return FileEntry(name=path.name, size_bytes=size, checksums=tuple(checksums))


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


def find_damage_to_load(path: Path, entry: FileEntry, pieces: Iterable[int]) -> str | None:
    """Do as :func:`find_damage`; raise CheckpointError if the file cannot be read."""
    try:
        return find_damage(path, entry, pieces)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}", do=TRY_AGAIN) from error


def _kind_of_file(path: Path) -> tuple[str, str] | None:
    """Return what has written a file that is no checkpoint, and how to load it; ``None`` if that is not known."""
    if not path.is_file():
        return None
    if path.suffix == ".safetensors":
        return "safetensors", f"rankwise.load_weights({path.name!r}, model)"
    with contextlib.suppress(OSError):
        if zipfile.is_zipfile(path):
            return "torch.save()", f"model.load_state_dict(torch.load({path.name!r})), before rankwise.replicate(model)"
    return None


def manifest_bytes(path: Path) -> bytes | None:
    """Return the bytes of a checkpoint's manifest; ``None`` if its directory has none.

    Raises:
        CheckpointError: there is no such directory, or the manifest cannot be read.
    """
    try:
        return plain(path / MANIFEST_NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if path.is_dir():
            return None
        kind = _kind_of_file(path)
        if kind is not None:
            raise CheckpointError(
                f"it is a file of {kind[0]}, and a checkpoint of rankwise is a folder", do=kind[1]
            ) from None
        what = "it is not a directory" if path.exists() else "there is no such directory"
    except OSError as error:
        what = f"{MANIFEST_NAME} cannot be read: {error}"
    raise CheckpointError(what, do=TRY_AGAIN)
