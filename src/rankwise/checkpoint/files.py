# SPDX-License-Identifier: Apache-2.0
"""Files of tensors: their header and bytes, reading regions of them, and the staging memory of a save.

Knows the safetensors layout and no other rank.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import safetensors
import torch

from rankwise.errors import CheckpointError
from rankwise.tensors.arrays import as_sent, memory_of
from rankwise.tensors.files import CODES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rankwise.checkpoint.manifest import Region, TensorEntry, TensorPart

    Bytes = bytes | memoryview

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
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))


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
    for name, (whole_dtype, whole_shape) in tensors.items():
        dtype, shape = _in_file(whole_dtype, whole_shape)
        end = offset + dtype_of(dtype).itemsize * math.prod(shape)
        fields[name] = {"dtype": CODES[dtype_of(dtype)], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _in_file(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape under which a tensor lies in its file."""
    if dtype in _PARTS_OF_COMPLEX:
        return _PARTS_OF_COMPLEX[dtype], (*shape, 2)
    return dtype, shape


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order, without a copy if they already are."""
    return memory_of(as_sent(tensor).cpu())


class StagingMemory:
    """Memory that a save copies tensors into, kept from one save to the next."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def take(self, size_bytes: int, *, pinned: bool) -> torch.Tensor:
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
    if found != _in_file(dtype, part.region.shape):
        raise CheckpointError(
            f"{part.file} and the manifest disagree about {part.name}.",
            evidence=f"manifest: {dtype}{list(part.region.shape)}\nfile: {found[0]}{list(found[1])}",
            do="load another checkpoint",
        )
    return tensor
