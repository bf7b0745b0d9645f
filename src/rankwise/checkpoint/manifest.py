# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint: what was saved, into which files, with which sizes and checksums.

Pure: values in, values out, no file, no torch, no process group.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import json
import math
import re
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from rankwise.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

K = TypeVar("K", bound="tuple[str, tuple[int, ...]]")

Json: TypeAlias = "bool | int | float | str | list[Any] | dict[str, Any] | None"

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
"""Raised when a manifest changes so that this code could not read it."""
PIECE_BYTES = 16 * 2**20
"""A file has one CRC-32 per piece of this many bytes, so that ranks can share the checking."""
SMALL_TENSOR_BYTES = 64 * 2**10
"""Smaller tensors are all written by the first rank that holds them: what belongs together (a BatchNorm's
mean, variance and count) then comes from one rank, and a small model is one file."""

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CHECKSUM_LENGTH = 8
_CHECKSUMS = re.compile(r"(?:[0-9a-f]{8},)*")
_FIRST_LINE = re.compile(rb'\{"checksum": "sha256:([0-9a-f]{64})",\n')
_WHAT_TO_DO = "restore the file from a copy, or load another checkpoint"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of tensors."""

    name: str
    """Its name in the checkpoint's directory; never a path."""
    size_bytes: int
    checksums: Sequence[str]
    """CRC-32 of each piece of ``PIECE_BYTES``, eight hexadecimal digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What tells a checkpoint that this process has written from every other one."""

    digest: bytes
    """SHA-256 of the manifest's file."""
    files: Sequence[FileEntry]


class Region(NamedTuple):
    """A box within a tensor."""

    offsets: tuple[int, ...]
    """Where it begins, per dimension."""
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """How many elements it holds."""
        return math.prod(self.shape)

    def common(self, other: Region) -> Region | None:
        """Return what two regions of one tensor share; ``None`` if that is nothing."""
        starts = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(a + n, b + m) - start
            for a, n, b, m, start in zip(self.offsets, self.shape, other.offsets, other.shape, starts, strict=True)
        )
        return Region(starts, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Region) -> tuple[slice, ...]:
        """Return the slices that pick this region out of the memory of ``outer``."""
        return tuple(
            slice(start - base, start - base + size)
            for start, size, base in zip(self.offsets, self.shape, outer.offsets, strict=True)
        )


def whole(shape: tuple[int, ...]) -> Region:
    """Return the region that covers a whole tensor."""
    return Region((0,) * len(shape), shape)


class TensorPart(NamedTuple):
    """A region of a tensor, and where it is stored."""

    file: str
    name: str
    """In the file."""
    region: Region


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor: what it is and where it is stored."""

    dtype: str
    """As torch names it, without ``torch.``: ``"float32"``."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    parts: tuple[TensorPart, ...]
    """Regions that cover it, without overlaps; a single one if it was whole on a rank."""


def in_one_part(name: str, *, file: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    """Return the entry of a tensor that is stored whole in one file, under its own name."""
    return TensorEntry(dtype=dtype, shape=shape, parts=(TensorPart(file, name, whole(shape)),))


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectEntry:
    """One object that was saved."""

    kind: str
    """Class of the object, as ``module.name``; for display only."""
    state: Json
    """Its state tree, with every tensor replaced by its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The description of a checkpoint: its objects, tensors and files."""

    rankwise_version: str
    torch_version: str
    world_size: int
    """How many ranks wrote it; any number may read it."""
    files: Mapping[str, FileEntry]
    """By name."""
    tensors: Mapping[str, TensorEntry]
    """By name: the path of the tensor's first place in the state."""
    objects: Mapping[str, ObjectEntry]
    """By the name given to ``save``."""
    generators: Mapping[str, Json] = field(default_factory=dict[str, "Json"])
    """The states of random number generators."""


def assign(size_bytes_of: Mapping[K, int], holders_of: Mapping[K, Collection[int]]) -> dict[K, int]:
    """Return the rank that writes each part, balanced by bytes; the same on every rank.

    Args:
        size_bytes_of: bytes of each part, by the tensor's name and the part's offsets.
        holders_of: ranks that hold it.
    """
    load_bytes: dict[int, int] = {}
    rank_of: dict[K, int] = {}
    # Of each set of holders, the least loaded first; a load that has grown since is found when it comes up.
    queues: dict[tuple[int, ...] | range, list[tuple[int, int]]] = {}
    for minus_size, key in sorted([(-size, key) for key, size in size_bytes_of.items()]):
        size, holders = -minus_size, holders_of[key]
        if size < SMALL_TENSOR_BYTES:
            rank = min(holders)
        else:
            group = holders if isinstance(holders, range) else tuple(holders)
            if group not in queues:
                queues[group] = [(load_bytes.get(rank, 0), -rank) for rank in group]
                heapq.heapify(queues[group])
            rank = _least_loaded(queues[group], load_bytes)
        rank_of[key] = rank
        load_bytes[rank] = load_bytes.get(rank, 0) + size
    return rank_of


def _least_loaded(queue: list[tuple[int, int]], load_bytes: Mapping[int, int]) -> int:
    """Return the rank with the smallest load, the last one of several; ``queue`` may hold loads that have grown."""
    while True:
        load, minus_rank = queue[0]
        now = load_bytes.get(-minus_rank, 0)
        if now == load:
            return -minus_rank
        heapq.heapreplace(queue, (now, minus_rank))


def pieces_to_check(files: Mapping[str, FileEntry], rank: int, world_size: int) -> dict[str, list[int]]:
    """Return the numbers of the pieces of each file that a rank checks.

    Pieces are assigned round-robin over all files, so that many small files are shared among ranks too.
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
        "tensors": _tensors_json(manifest.tensors),
        "objects": {name: {"kind": entry.kind, "state": entry.state} for name, entry in manifest.objects.items()},
        "generators": dict(manifest.generators),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in sections.items()]
    rest = (",\n".join(lines) + "\n}\n").encode()
    return b'{"checksum": "sha256:' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest


def _tensors_json(tensors: Mapping[str, TensorEntry]) -> dict[str, Json]:
    sections: dict[str, Json] = {}
    for name, entry in tensors.items():
        first = entry.parts[0]
        section: dict[str, Json] = {"dtype": entry.dtype, "shape": list(entry.shape)}
        if first.region.shape == entry.shape and first.name == name:
            sections[name] = {"file": first.file, **section}
            continue
        parts = [
            {"file": file, "name": inside, "offsets": list(region.offsets), "shape": list(region.shape)}
            for file, inside, region in entry.parts
        ]
        sections[name] = {**section, "parts": parts}
    return sections


def find_damage(data: bytes) -> str | None:
    """Return how the bytes of a manifest's file are damaged, or ``None``: they have their checksum.

    Raises:
        CheckpointError: they have none because they are of a format that this rankwise does not know.
    """
    first = _FIRST_LINE.match(data)
    if first is not None:
        found = hashlib.sha256(data[first.end() :]).hexdigest()
        return None if found == first[1].decode() else f"{MANIFEST_NAME} is damaged: its checksum differs"
    # What names no version is no manifest.
    with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
        _refuse_other_versions(json.loads(data))
    return f"{MANIFEST_NAME} is not a rankwise manifest"


def decode(data: bytes) -> Manifest:
    """Return the manifest that a file's bytes encode.

    Raises:
        CheckpointError: they are damaged, have a format that this rankwise does not know, or name a file outside the
            checkpoint.
    """
    damage = find_damage(data)
    if damage is not None:
        raise CheckpointError(f"{damage}.", do=_WHAT_TO_DO)
    try:
        sections = json.loads(data)
        _refuse_other_versions(sections)
        return _manifest_of(sections)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{MANIFEST_NAME} cannot be read: {type(error).__name__}: {error}", do=_WHAT_TO_DO
        ) from error


def _refuse_other_versions(sections: dict[str, Any]) -> None:
    version = sections["format_version"]
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{MANIFEST_NAME} has format version {version!r}; this rankwise reads {FORMAT_VERSION}.",
            do="install the rankwise version that wrote it: " + str(sections["rankwise_version"]),
        )


def _manifest_of(sections: dict[str, Any]) -> Manifest:
    if sections["piece_bytes"] != PIECE_BYTES:
        raise ValueError(f"pieces of {sections['piece_bytes']!r} bytes")
    files = {name: _file_entry(name, entry) for name, entry in sections["files"].items()}
    return Manifest(
        rankwise_version=_text(sections["rankwise_version"]),
        torch_version=_text(sections["torch_version"]),
        world_size=_count(sections["world_size"]),
        files=files,
        tensors={name: _tensor_entry(name, entry, files) for name, entry in sections["tensors"].items()},
        objects={
            name: ObjectEntry(kind=_text(entry["kind"]), state=entry["state"])
            for name, entry in sections["objects"].items()
        },
        generators=_generators(sections["generators"]),
    )


def _generators(section: dict[str, Any]) -> dict[str, Json]:
    if section:
        tuple(map(_text, section["in_loop"]))
        if not all(isinstance(of_ranks, list) and of_ranks for of_ranks in section["states"].values()):
            raise ValueError("generators without states")
    return section


def _file_entry(name: str, entry: dict[str, Any]) -> FileEntry:
    if not _SAFE_NAME.fullmatch(name):
        raise CheckpointError(
            f"{MANIFEST_NAME} names a file outside the checkpoint: {name!r}.",
            do="do not load it: rankwise does not write such names",
        )
    size = _count(entry["size_bytes"])
    checksums: tuple[str, ...] = tuple(entry["crc32"])
    # All at once: the files of a large job have hundreds of thousands.
    text = "".join([f"{checksum}," for checksum in checksums])
    is_right = _CHECKSUMS.fullmatch(text) and len(text) == (_CHECKSUM_LENGTH + 1) * len(checksums)
    if len(checksums) != -(-size // PIECE_BYTES) or not is_right:
        raise ValueError(f"the checksums of {name} do not match its {size} bytes")
    return FileEntry(name=name, size_bytes=size, checksums=checksums)


def _tensor_entry(name: str, entry: dict[str, Any], files: Mapping[str, FileEntry]) -> TensorEntry:
    dtype, shape = _text(entry["dtype"]), _counts(entry["shape"])
    if "parts" not in entry:
        return in_one_part(name, file=_known_file(entry, files), dtype=dtype, shape=shape)
    parts = tuple(
        TensorPart(
            _known_file(part, files), _text(part["name"]), Region(_counts(part["offsets"]), _counts(part["shape"]))
        )
        for part in entry["parts"]
    )
    if not tiles([part.region for part in parts], shape):
        raise ValueError(f"the parts of {name} do not cover {list(shape)}")
    return TensorEntry(dtype=dtype, shape=shape, parts=parts)


def tiles(regions: Collection[Region], shape: tuple[int, ...]) -> bool:
    """Return whether regions cover a tensor, each element once."""
    everything = whole(shape)
    inside = all(
        len(region.offsets) == len(region.shape) == len(shape)
        and (region == everything or region.common(everything) == region)
        for region in regions
    )
    if not regions or not inside or sum(region.num_elements for region in regions) != everything.num_elements:
        return False
    # With as many elements as the whole, they cover it unless two of them overlap. Cut along planes that cross no
    # region, until each region is alone: every supported sharding can be cut so.
    left = [list(regions)]
    while left:
        group = left.pop()
        cut = next((found for dim in range(len(shape)) if len(found := _cut(group, dim)) > 1), None)
        if cut is not None:
            left += cut
        elif any(one.common(other) for one, other in combinations(group, 2)):
            return False
    return True


def _cut(regions: Collection[Region], dim: int) -> list[list[Region]]:
    """Return regions in groups that do not overlap along a dim."""
    groups: list[list[Region]] = []
    end = 0
    for region in sorted(regions, key=lambda region: region.offsets[dim]):
        start = region.offsets[dim]
        if not groups or start >= end:
            groups.append([])
        groups[-1].append(region)
        end = max(end, start + region.shape[dim])
    return groups


def _known_file(entry: dict[str, Any], files: Mapping[str, FileEntry]) -> str:
    file = _text(entry["file"])
    if file not in files:
        raise ValueError(f"no file {file!r}")
    return file


def _counts(values: list[Any]) -> tuple[int, ...]:
    return tuple(map(_count, values))


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value
