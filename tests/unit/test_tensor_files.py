# SPDX-License-Identifier: Apache-2.0
"""Plain safetensors files: names, dtypes and shapes without reading, one tensor or region at a time, and damage."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from rankwise.errors import CheckpointError, ConfigurationError
from rankwise.tensors.files import open_tensor_files

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = {
    "a.weight": torch.arange(24.0, dtype=torch.float64).reshape(4, 6),
    "b": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 3),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "one": torch.tensor(3),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    save_file(TENSORS, path)
    return path


def _folder(path: Path, *, weight_map: dict[str, str] | None) -> Path:
    path.mkdir()
    names = sorted(TENSORS)
    for number, part in enumerate((names[:2], names[2:])):
        save_file({name: TENSORS[name] for name in part}, path / f"part-{number}.safetensors")
    if weight_map is not None:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def test_every_tensor_of_a_file_and_its_regions(file: Path) -> None:
    with open_tensor_files(file) as files:
        assert sorted(files.entries) == sorted(TENSORS)
        for name, expected in TENSORS.items():
            entry = files.entries[name]
            assert (entry.dtype, entry.shape, entry.num_bytes) == (expected.dtype, expected.shape, expected.nbytes)
            assert torch.equal(files.read(name), expected)
            assert torch.equal(files.read_slice(name, ()), expected)
        region = files.read_slice("a.weight", (slice(1, 3), slice(2, 6)))
        assert torch.equal(region, TENSORS["a.weight"][1:3, 2:6])
        into = torch.zeros(4, 6, dtype=torch.float32, requires_grad=True)
        files.read_into("a.weight", into)
        assert torch.equal(into, TENSORS["a.weight"].float())


def test_fitting_and_equal_values(tmp_path: Path) -> None:
    numbers = torch.tensor([1.5, torch.nan, -0.0])
    tensors = {"a": numbers, "b": numbers.clone(), "other": numbers + 1, "wide": numbers.double()}
    tensors |= {"flat": numbers.clone()[None], "int": torch.tensor(3), "again": torch.tensor(3)}
    save_file(tensors, tmp_path / "weights.safetensors")
    with open_tensor_files(tmp_path / "weights.safetensors") as files:
        pairs = [("a", "b"), ("int", "again"), ("a", "other"), ("a", "wide"), ("a", "flat")]
        assert [files.are_equal(pair) for pair in pairs] == [True, True, False, False, False]
        with pytest.raises(CheckpointError, match="no tensor 'c'"):
            files.are_equal(["a", "c"])
        assert files.entries["wide"].fits(numbers.bfloat16())
        assert not files.entries["wide"].fits(numbers.long())
        assert not files.entries["int"].fits(torch.tensor(3, dtype=torch.int32))
        assert not files.entries["flat"].fits(numbers)


def test_a_read_value_belongs_to_the_reader(file: Path) -> None:
    with open_tensor_files(file) as files:
        whole, region = files.read("a.weight"), files.read_slice("a.weight", (slice(0, 1),))
    for tensor in (whole, region):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        tensor.zero_()
    file.write_bytes(bytes(file.stat().st_size))
    assert not whole.any()
    with pytest.raises(CheckpointError, match="closed"):
        files.read("a.weight")


def test_a_folder_with_and_without_an_index(tmp_path: Path) -> None:
    for weight_map, expected in (
        (None, sorted(TENSORS)),
        ({"b": "part-0.safetensors", "one": "part-1.safetensors"}, ["b", "one"]),
    ):
        folder = _folder(tmp_path / f"folder-{len(expected)}", weight_map=weight_map)
        with open_tensor_files(folder) as files:
            assert sorted(files.entries) == expected
            assert all(torch.equal(files.read(name), TENSORS[name]) for name in expected)
            assert {entry.file.name for entry in files.entries.values()} == {"part-0.safetensors", "part-1.safetensors"}
    with open_tensor_files(folder / "model.safetensors.index.json") as files:
        assert sorted(files.entries) == ["b", "one"]


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"one": "part-0.safetensors"}, "lacks 1 tensors that the index says"),
        ({"one": "part-9.safetensors"}, r"part-9\.safetensors cannot be read"),
        ({"one": "../part-0.safetensors"}, "outside its folder"),
    ],
)
def test_an_index_that_is_wrong(tmp_path: Path, weight_map: dict[str, str], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_tensor_files(_folder(tmp_path / "folder", weight_map=weight_map))


def test_an_address_that_cannot_be_opened(tmp_path: Path, file: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        open_tensor_files(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="has no tensor 'c'"), open_tensor_files(file) as files:
        files.read("c")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "pytorch_model.bin").write_bytes(b"old")
    with pytest.raises(ConfigurationError, match=r"contains no \.safetensors file") as caught:
        open_tensor_files(tmp_path / "empty")
    assert "pytorch_model.bin" in str(caught.value)
    twice = _folder(tmp_path / "twice", weight_map=None)
    save_file({"one": TENSORS["one"]}, twice / "again.safetensors")
    with pytest.raises(CheckpointError, match="Two files contain 'one'"):
        open_tensor_files(twice)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_tensor_files(file)
