# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint: what was saved, into which files, with which sizes and checksums.

Pure: values in, values out, no file, no torch, no process group. Must not know how files are
written. Imported by the other files of this room.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from rankwise.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

Json: TypeAlias = "bool | int | float | str | list[Any] | dict[str, Any] | None"

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
PIECE_BYTES = 16 * 2**20
"""A file has one CRC-32 per piece of this many bytes, so that ranks can share the checking."""
SMALL_TENSOR_BYTES = 64 * 2**10
"""Smaller tensors are all written by rank zero: what belongs together (a BatchNorm's mean, variance
and count) then comes from one rank, and a small model makes one file."""

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CHECKSUM = re.compile(r"[0-9a-f]{8}")
_FIRST_LINE = re.compile(rb'\{"checksum": "sha256:([0-9a-f]{64})",\n')
_WHAT_TO_DO = "restore the file from a copy, or name another checkpoint"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of tensors."""

    name: str
    """Its name in the checkpoint's directory; never a path."""
    size_bytes: int
    """Its whole length."""
    checksums: tuple[str, ...]
    """CRC-32 of each piece of ``PIECE_BYTES``, eight hexadecimal digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor: where it lies and what it is.

    A tensor is whole in one file. State that is spread over ranks will need a list of parts here,
    each with its offsets in the whole; ``file`` is the one place to change.
    """

    file: str
    """Name of its file."""
    dtype: str
    """As torch names it, without ``torch.``: ``"float32"``."""
    shape: tuple[int, ...]
    """Its sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectEntry:
    """One object that was saved."""

    kind: str
    """Class of the object, as ``module.name``; only to be told to a person."""
    state: Json
    """Its state tree, with every tensor replaced by its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All that a checkpoint says about itself."""

    rankwise_version: str
    """Of the rankwise that wrote it."""
    torch_version: str
    """Of the torch that wrote it."""
    world_size: int
    """How many ranks wrote it; any number may read it."""
    files: Mapping[str, FileEntry]
    """By name."""
    tensors: Mapping[str, TensorEntry]
    """By name: the path of the tensor's first place in the state."""
    objects: Mapping[str, ObjectEntry]
    """By the name given to ``save``."""


def assign(size_bytes_of: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Divide tensors among ranks, balanced by bytes; the same on every rank.

    Args:
        size_bytes_of: bytes of each tensor, by name.
        world_size: how many ranks share the writing.

    Returns:
        The rank that writes each tensor.
    """
    load_bytes = [0] * world_size
    rank_of: dict[str, int] = {}
    for name, size in sorted(size_bytes_of.items(), key=lambda item: (-item[1], item[0])):
        small = size < SMALL_TENSOR_BYTES
        rank = 0 if small else min(range(world_size), key=lambda rank: (load_bytes[rank], -rank))
        rank_of[name] = rank
        load_bytes[rank] += size
    return rank_of


def pieces_to_check(files: Mapping[str, FileEntry], rank: int, world_size: int) -> dict[str, list[int]]:
    """Return the numbers of the pieces of each file that a rank checks.

    Pieces are dealt out over all files in turn, so that many small files are shared among ranks
    too.
    """
    shares: dict[str, list[int]] = {}
    num_before = 0
    for name, entry in sorted(files.items()):
        first = (rank - num_before) % world_size
        shares[name] = list(range(first, len(entry.checksums), world_size))
        num_before += len(entry.checksums)
    return shares


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of the manifest's file: JSON whose first line is a checksum of the rest."""
    sections: dict[str, Json] = {
        "format_version": FORMAT_VERSION,
        "rankwise_version": manifest.rankwise_version,
        "torch_version": manifest.torch_version,
        "world_size": manifest.world_size,
        "piece_bytes": PIECE_BYTES,
        "files": {
            name: {"size_bytes": entry.size_bytes, "crc32": list(entry.checksums)}
            for name, entry in manifest.files.items()
        },
        "tensors": {
            name: {"file": entry.file, "dtype": entry.dtype, "shape": list(entry.shape)}
            for name, entry in manifest.tensors.items()
        },
        "objects": {name: {"kind": entry.kind, "state": entry.state} for name, entry in manifest.objects.items()},
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in sections.items()]
    rest = (",\n".join(lines) + "\n}\n").encode()
    return b'{"checksum": "sha256:' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest


def decode(data: bytes) -> Manifest:
    """Return what the bytes of a manifest file say.

    Raises:
        CheckpointError: they are not a manifest, are damaged, of a format this rankwise does not
            know, or name a file outside the checkpoint.
    """
    first = _FIRST_LINE.match(data)
    if first is None:
        raise CheckpointError(f"{MANIFEST_NAME} is not a manifest of rankwise.", do=_WHAT_TO_DO)
    found = hashlib.sha256(data[first.end() :]).hexdigest()
    if found != first[1].decode():
        raise CheckpointError(f"{MANIFEST_NAME} is damaged: its checksum differs.", do=_WHAT_TO_DO)
    try:
        sections = json.loads(data)
        version = sections["format_version"]
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{MANIFEST_NAME} has format version {version!r}; this rankwise reads {FORMAT_VERSION}.",
                do="install the rankwise that wrote it: " + str(sections["rankwise_version"]),
            )
        return _manifest_of(sections)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{MANIFEST_NAME} cannot be read: {type(error).__name__}: {error}", do=_WHAT_TO_DO
        ) from error


def _manifest_of(sections: dict[str, Any]) -> Manifest:
    if sections["piece_bytes"] != PIECE_BYTES:
        message = f"pieces of {sections['piece_bytes']!r} bytes"
        raise ValueError(message)
    files = {name: _file_entry(name, entry) for name, entry in sections["files"].items()}
    return Manifest(
        rankwise_version=_text(sections["rankwise_version"]),
        torch_version=_text(sections["torch_version"]),
        world_size=_count(sections["world_size"]),
        files=files,
        tensors={name: _tensor_entry(entry, files) for name, entry in sections["tensors"].items()},
        objects={
            name: ObjectEntry(kind=_text(entry["kind"]), state=entry["state"])
            for name, entry in sections["objects"].items()
        },
    )


def _file_entry(name: str, entry: dict[str, Any]) -> FileEntry:
    if not _SAFE_NAME.fullmatch(name):
        raise CheckpointError(
            f"{MANIFEST_NAME} names a file outside the checkpoint: {name!r}.",
            do="do not load it: rankwise does not write such names",
        )
    size = _count(entry["size_bytes"])
    checksums = tuple(_text(checksum) for checksum in entry["crc32"])
    if len(checksums) != -(-size // PIECE_BYTES) or not all(map(_CHECKSUM.fullmatch, checksums)):
        message = f"the checksums of {name} do not fit its {size} bytes"
        raise ValueError(message)
    return FileEntry(name=name, size_bytes=size, checksums=checksums)


def _tensor_entry(entry: dict[str, Any], files: Mapping[str, FileEntry]) -> TensorEntry:
    file = _text(entry["file"])
    if file not in files:
        message = f"no file {file!r}"
        raise ValueError(message)
    shape = tuple(_count(size) for size in entry["shape"])
    return TensorEntry(file=file, dtype=_text(entry["dtype"]), shape=shape)


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        message = f"{value!r} is not a count"
        raise ValueError(message)
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        message = f"{value!r} is not text"
        raise TypeError(message)
    return value
