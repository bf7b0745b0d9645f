# SPDX-License-Identifier: Apache-2.0
"""The manifest: what is written comes back, and nothing altered is believed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from typing import Any

import pytest

from rankwise.checkpoint import manifest
from rankwise.checkpoint.manifest import FileEntry, Manifest, ObjectEntry, Region, TensorEntry, TensorPart, in_one_part
from rankwise.errors import CheckpointError


def _manifest(file: str = "part-00000.safetensors") -> Manifest:
    size = manifest.PIECE_BYTES + 7
    return Manifest(
        rankwise_version="1.2.3",
        torch_version="2.13.0",
        world_size=2,
        files={file: FileEntry(name=file, size_bytes=size, checksums=("0123abcd", "89abcdef"))},
        tensors={"model.weight": in_one_part("model.weight", file=file, dtype="float32", shape=(3, 0))},
        objects={"model": ObjectEntry(kind="torch.nn.Linear", state={"dict": {"weight": {"tensor": "model.weight"}}})},
    )


def _signed(sections: dict[str, Any]) -> bytes:
    """Return a manifest with any content and a right checksum, as an enemy would make it."""
    rest = json.dumps(sections)[1:].encode()
    return b'{"checksum": "sha256:' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest


def _sections() -> dict[str, Any]:
    sections = json.loads(manifest.encode(_manifest()))
    del sections["checksum"]
    return sections


def test_a_manifest_comes_back_as_it_was() -> None:
    assert manifest.decode(manifest.encode(_manifest())) == _manifest()
    assert json.loads(manifest.encode(_manifest()))["world_size"] == 2
    assert manifest.decode(_signed(_sections())) == _manifest()


def _in_parts(*regions: Region) -> Manifest:
    file = "part-00000.safetensors"
    parts = tuple(TensorPart(file, f"model.weight[{number}]", region) for number, region in enumerate(regions))
    entry = TensorEntry(dtype="float32", shape=(5, 4), parts=parts)
    return dataclasses.replace(_manifest(), tensors={"model.weight": entry})


_HALVES = (Region((0, 0), (3, 4)), Region((3, 0), (2, 4)))


def test_tensors_in_parts_load() -> None:
    assert manifest.decode(manifest.encode(_in_parts(*_HALVES))) == _in_parts(*_HALVES)
    assert json.loads(manifest.encode(_manifest()))["tensors"] == {
        "model.weight": {"file": "part-00000.safetensors", "dtype": "float32", "shape": [3, 0]}
    }


@pytest.mark.parametrize(
    "regions",
    [
        (),
        _HALVES[:1],
        (*_HALVES, Region((0, 0), (1, 1))),
        (Region((0, 0), (3, 4)), Region((2, 0), (2, 4))),
        (Region((0, 0), (3, 4)), Region((3, 0), (3, 4))),
        (Region((0,), (20,)),),
        (Region((0, 0), (3, 4)), Region((0, 0), (2, 4))),
    ],
)
def test_parts_that_do_not_make_up_their_tensor_are_refused(regions: tuple[Region, ...]) -> None:
    with pytest.raises(CheckpointError, match=r"the parts of model\.weight do not cover"):
        manifest.decode(manifest.encode(_in_parts(*regions) if regions else _emptied()))


def _emptied() -> Manifest:
    whole_one = _in_parts(*_HALVES)
    entry = dataclasses.replace(
        whole_one.tensors["model.weight"], parts=(TensorPart("part-00000.safetensors", "x", Region((0, 0), (0, 4))),)
    )
    return dataclasses.replace(whole_one, tensors={"model.weight": entry})


def test_regions_know_what_they_share() -> None:
    one, other = Region((1, 2), (3, 4)), Region((2, 0), (9, 3))
    assert one.common(other) == other.common(one) == Region((2, 2), (2, 1))
    assert one.common(Region((4, 2), (1, 1))) is None
    assert Region((2, 2), (2, 1)).within(one) == (slice(1, 3), slice(0, 1))
    assert Region((), ()).common(Region((), ())) == Region((), ())


def test_no_flipped_bit_is_believed() -> None:
    data = manifest.encode(_manifest())
    for place in range(len(data)):
        for bit in range(8):
            altered = bytearray(data)
            altered[place] ^= 1 << bit
            with pytest.raises(CheckpointError):
                manifest.decode(bytes(altered))


def test_no_shorter_or_longer_file_is_believed() -> None:
    data = manifest.encode(_manifest())
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            manifest.decode(data[:length])
    with pytest.raises(CheckpointError):
        manifest.decode(data + b"\n")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ".hidden", "", "a\0b", "a\\b", "x\n"])
def test_a_file_outside_the_checkpoint_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        manifest.decode(manifest.encode(_manifest(name)))


def test_another_format_version_names_what_can_read_it() -> None:
    with pytest.raises(CheckpointError, match=r"(?s)format version 99.*install the rankwise.*1\.2\.3"):
        manifest.decode(_signed({**_sections(), "format_version": 99}))


@pytest.mark.parametrize(
    "change",
    [
        {"world_size": -1},
        {"world_size": "2"},
        {"world_size": True},
        {"files": []},
        {"piece_bytes": 1},
        {"files": {"f": {"size_bytes": 10, "crc32": []}}},
        {"files": {"f": {"size_bytes": 10, "crc32": ["xyz"]}}},
        {"tensors": {"t": {"file": "elsewhere", "dtype": "float32", "shape": []}}},
        {"tensors": {"t": {"file": "part-00000.safetensors", "dtype": "float32", "shape": [-1]}}},
        {"objects": {"model": None}},
    ],
)
def test_nonsense_with_a_right_checksum_is_an_error_of_ours(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=re.escape("manifest.json cannot be read")):
        manifest.decode(_signed({**_sections(), **change}))


def _on_all(sizes: dict[str, int], world_size: int) -> dict[str, int]:
    keys = {(name, (0,)): size for name, size in sizes.items()}
    return {name: rank for (name, _), rank in manifest.assign(keys, dict.fromkeys(keys, range(world_size))).items()}


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_the_writing_is_shared_evenly(world_size: int) -> None:
    big = manifest.SMALL_TENSOR_BYTES
    sizes = {f"t{i}": big + 1000 * i for i in range(40)}
    rank_of = _on_all(sizes, world_size)
    assert _on_all(dict(reversed(sizes.items())), world_size) == rank_of
    loads = [sum(sizes[name] for name in sizes if rank_of[name] == rank) for rank in range(world_size)]
    assert max(loads) - min(loads) <= max(sizes.values())


def test_small_tensors_stay_together_on_rank_zero() -> None:
    sizes = {f"t{i}": manifest.SMALL_TENSOR_BYTES - 1 for i in range(9)} | {"big": manifest.SMALL_TENSOR_BYTES * 99}
    rank_of = _on_all(sizes, 3)
    assert {rank for name, rank in rank_of.items() if name != "big"} == {0}
    assert rank_of["big"] != 0


def test_a_rank_writes_only_what_it_holds_and_replicas_share_it() -> None:
    big = manifest.SMALL_TENSOR_BYTES
    holders = {(f"t{i}", (half,)): (half, half + 2) for i in range(10) for half in (0, 1)}
    rank_of = manifest.assign(dict.fromkeys(holders, big), holders)
    assert all(rank in holders[key] for key, rank in rank_of.items())
    assert [list(rank_of.values()).count(rank) for rank in range(4)] == [5] * 4
    assert set(manifest.assign(dict.fromkeys(holders, 8), holders).values()) == {0, 1}


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_piece_is_checked_by_one_rank(world_size: int) -> None:
    counts = {"a": 3, "b": 0, "c": 7, "d": 1, "e": 1, "f": 1}
    files = {
        name: FileEntry(name=name, size_bytes=count * manifest.PIECE_BYTES, checksums=("0" * 8,) * count)
        for name, count in counts.items()
    }
    shares = [manifest.pieces_to_check(files, rank, world_size) for rank in range(world_size)]
    for name, count in counts.items():
        assert sorted(piece for share in shares for piece in share[name]) == list(range(count))
    loads = [sum(map(len, share.values())) for share in shares]
    assert max(loads) - min(loads) <= 1
