# SPDX-License-Identifier: Apache-2.0
"""Files of tensors: safetensors can read them, and damage anywhere is found."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from rankwise.checkpoint import files, state
from rankwise.checkpoint.manifest import FileEntry, Region, TensorEntry, TensorPart, in_one_part, tiles, whole
from rankwise.errors import CheckpointError
from rankwise.tensors.arrays import as_sent, memory_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PIECE_BYTES = 64


@pytest.fixture
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", PIECE_BYTES)


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(memory_of(as_sent(tensor)))


def _tensors() -> dict[str, torch.Tensor]:
    noise = torch.randn(3, 5, dtype=torch.float64).abs() * 9
    tensors = {name: noise.to(getattr(torch, name)) for name in sorted(state.TENSOR_DTYPES)}
    return tensors | {
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "transposed": noise.t(),
        "strided": noise[:, ::2],
        "expanded": noise[0].expand(4, 5),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> FileEntry:
    return files.write_file(path, [files.header_of(tensors), *map(_bits, tensors.values())])


def _read(folder: Path, entries: dict[str, TensorEntry]) -> dict[str, torch.Tensor]:
    back = files.read_regions(folder, [(entry, whole(entry.shape)) for entry in entries.values()])
    return dict(zip(entries, back, strict=True))


def test_every_tensor_comes_back(tmp_path: Path) -> None:
    tensors = files.in_file_order(_tensors())
    entry = _write(tmp_path / "f", tensors)
    entries = {
        name: in_one_part(name, file="f", dtype=files.dtype_name(tensor.dtype), shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    back = _read(tmp_path, entries)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape), name
        assert _bits(back[name]) == _bits(tensor), name
    assert files.find_damage(tmp_path / "f", entry, range(len(entry.checksums))) is None


def test_the_copy_in_staging_memory_makes_the_same_file(tmp_path: Path) -> None:
    tensors = files.in_file_order(_tensors())
    memory = files.StagingMemory().reserve(sum(t.nbytes for t in tensors.values()), pinned=False)
    files.copy_into(memory, tensors)
    assert bytes(memory_of(memory)) == b"".join(map(_bits, tensors.values()))
    direct = _write(tmp_path / "direct", tensors)
    staged = files.write_file(tmp_path / "staged", [files.header_of(tensors), memory_of(memory)])
    assert staged.checksums == direct.checksums


def test_any_safetensors_reader_reads_it(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(2, 3), 'é"\n': torch.arange(3, dtype=torch.uint8)}
    _write(tmp_path / "f", files.in_file_order(tensors))
    back = load_file(tmp_path / "f")
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_staging_memory_is_kept_while_it_is_large_enough() -> None:
    memory = files.StagingMemory()
    first = memory.reserve(1000, pinned=False).data_ptr()
    assert memory.reserve(10, pinned=False).data_ptr() == first
    assert memory.reserve(1000, pinned=False).data_ptr() == first
    assert memory.reserve(2000, pinned=False).numel() == 2000
    assert memory.reserve(0, pinned=False).numel() == 0


@pytest.mark.usefixtures("_small_pieces")
def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "f"
    entry = _write(path, {"a": torch.arange(50.0), "b": torch.arange(3)})
    data = path.read_bytes()
    assert len(entry.checksums) > 3
    for place in range(len(data)):
        altered = bytearray(data)
        altered[place] ^= 1 << (place % 8)
        path.write_bytes(altered)
        damage = files.find_damage(path, entry, range(len(entry.checksums)))
        assert damage is not None
        assert damage.startswith("f is damaged: its checksum differs")
        # Only the rank that checks this piece sees it.
        others = [n for n in range(len(entry.checksums)) if n != place // PIECE_BYTES]
        assert files.find_damage(path, entry, others) is None


@pytest.mark.usefixtures("_small_pieces")
def test_any_other_length_is_found(tmp_path: Path) -> None:
    path = tmp_path / "f"
    entry = _write(path, {"a": torch.arange(50.0)})
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        expected = f"f is truncated: {len(data)} bytes expected, {length} found"
        assert files.find_damage(path, entry, ()) == expected
    path.write_bytes(data + b"x")
    assert files.find_damage(path, entry, ()) == f"f is too long: {len(data)} bytes expected, {len(data) + 1} found"
    path.unlink()
    assert files.find_damage(path, entry, ()) == "f is missing"


@pytest.mark.usefixtures("_small_pieces")
def test_pieces_are_cut_where_the_reader_cuts_them(tmp_path: Path) -> None:
    data = bytes(range(256)) * 3
    parts = [data[:1], data[1:100], b"", data[100:640], data[640:]]
    assert files.write_file(tmp_path / "a", parts).checksums == files.write_file(tmp_path / "b", [data]).checksums
    assert (tmp_path / "a").read_bytes() == data
    whole = files.write_file(tmp_path / "c", [data[: 2 * PIECE_BYTES]])
    assert len(whole.checksums) == 2


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        files.write_file(tmp_path / "f", [b"other"])


def test_a_file_and_a_manifest_that_disagree_are_an_error(tmp_path: Path) -> None:
    _write(tmp_path / "f", {"a": torch.ones(2, 3)})
    for entry in (
        in_one_part("a", file="f", dtype="float32", shape=(3, 2)),
        in_one_part("a", file="f", dtype="int32", shape=(2, 3)),
    ):
        with pytest.raises(CheckpointError, match="disagree about a"):
            _read(tmp_path, {"a": entry})
    with pytest.raises(CheckpointError, match="cannot be read"):
        _read(tmp_path, {"b": in_one_part("b", file="f", dtype="float32", shape=(2, 3))})
    with pytest.raises(CheckpointError, match="dtype 'float7', which this torch does not have"):
        _read(tmp_path, {"a": in_one_part("a", file="f", dtype="float7", shape=(2, 3))})


@pytest.mark.parametrize("name", sorted(state.TENSOR_DTYPES))
def test_a_region_is_put_together_from_the_parts_it_touches(tmp_path: Path, name: str) -> None:
    everything = (torch.randn(5, 7, 3, dtype=torch.float64).abs() * 9).to(getattr(torch, name))
    cuts = [Region((r, c, 0), (2 + (r == 2), 4 - (c == 4), 3)) for r in (0, 2) for c in (0, 4)]
    parts = []
    for number, region in enumerate(cuts):
        tensors = {f"x{number}": everything[region.within(whole((5, 7, 3)))]}
        _write(tmp_path / f"f{number % 2}{number}", tensors)
        parts.append(TensorPart(f"f{number % 2}{number}", f"x{number}", region))
    entry = TensorEntry(dtype=name, shape=(5, 7, 3), parts=tuple(parts))
    regions = [
        whole((5, 7, 3)),
        Region((1, 3, 1), (2, 2, 2)),
        Region((4, 6, 2), (1, 1, 1)),
        Region((1, 1, 1), (3, 0, 2)),
    ]
    for region, back in zip(regions, files.read_regions(tmp_path, [(entry, r) for r in regions]), strict=True):
        assert back.dtype == everything.dtype
        assert _bits(back) == _bits(everything[region.within(whole((5, 7, 3)))])


@pytest.mark.parametrize(("rows", "columns"), [(3000, 1), (1, 3000), (50, 60)])
def test_the_work_of_reading_grows_with_the_number_of_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, columns: int
) -> None:
    num_files = 8
    everything = torch.arange(4 * rows * columns).view(2 * rows, 2 * columns)
    shape = tuple(everything.shape)
    parts: list[TensorPart] = []
    tensors_of: list[dict[str, torch.Tensor]] = [{} for _ in range(num_files)]
    for number, (row, column) in enumerate(itertools.product(range(rows), range(columns))):
        region = Region((2 * row, 2 * column), (2, 2))
        parts.append(TensorPart(f"f{number % num_files}", f"w{number}", region))
        tensors_of[number % num_files][f"w{number}"] = everything[region.within(whole(shape))]
    for number, tensors in enumerate(tensors_of):
        _write(tmp_path / f"f{number}", tensors)
    calls: Counter[str] = Counter()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def count_and_call(*arguments: Any, **keywords: Any) -> Any:
            calls[name] += 1
            return call(*arguments, **keywords)

        return count_and_call

    monkeypatch.setattr(files.safetensors, "safe_open", counted("open", files.safetensors.safe_open))
    monkeypatch.setattr(Region, "common", counted("common", Region.common))
    assert tiles([part.region for part in parts], shape)
    assert calls["common"] <= len(parts)
    entry = TensorEntry(dtype="int64", shape=shape, parts=tuple(parts))
    (back,) = files.read_regions(tmp_path, [(entry, whole(shape))])
    assert torch.equal(back, everything)
    assert calls["open"] == num_files
    assert calls["common"] <= 2 * len(parts)
