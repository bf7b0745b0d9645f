# SPDX-License-Identifier: Apache-2.0
"""Objects laid out in a file: the same values back, their bulk being the file."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from rankwise.data.shared import PackedList, pack, unpack


def there_and_back(value: Any) -> Any:
    with tempfile.TemporaryFile() as file:
        place = pack(value, file)
        file.flush()
        return unpack(file.fileno(), place)


def packed_bytes(value: Any) -> int:
    with tempfile.TemporaryFile() as file:
        pack(value, file)
        return file.tell()


def test_tensors_of_every_kind() -> None:
    whole = torch.arange(60.0).reshape(20, 3)
    value = {
        "whole": whole,
        "view": whole[3:5],
        "strided": whole[:, 1],
        "half": torch.ones(3, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1j]),
        "scalar": torch.tensor(3),
        "nothing": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    back = there_and_back(value)
    for name, tensor in value.items():
        assert torch.equal(back[name], tensor), name
        assert back[name].dtype == tensor.dtype
        assert back[name].stride() == tensor.stride()
    assert type(back["parameter"]) is torch.nn.Parameter
    assert back["view"].data_ptr() == back["whole"][3:].data_ptr()


def test_arrays_of_every_kind() -> None:
    value = [
        np.arange(12, dtype=">i4").reshape(3, 4),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(20).reshape(4, 5)[:, ::2],
        np.arange(5)[::-1],
        np.array(["2020-01-01", "NaT"], dtype="M8[D]"),
        np.array(["ab", "c"]),
        np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(7),
        np.zeros((0, 3)),
        np.array([{"k": 1}, None], dtype=object),
    ]
    for before, after in zip(value, there_and_back(value), strict=True):
        assert after.dtype == before.dtype
        assert after.shape == before.shape
        assert np.array_equal(after, before, equal_nan=before.dtype.kind == "M")
    assert there_and_back(value)[1].flags.f_contiguous


def test_memory_used_twice_is_stored_once() -> None:
    tensor, array, words = torch.zeros(100_000), np.zeros(100_000), ["x" * 100] * 2000
    once = packed_bytes([tensor, array, words])
    again = {"views": [tensor[i] for i in range(0, 1000, 100)], "same": array, "words": words}
    assert packed_bytes([tensor, array, words, again]) < once + 20_000


def test_views_of_different_parts_are_distinguished() -> None:
    array = np.arange(10)
    halves = there_and_back(
        [
            array[:5],
            array[5:],
            array[::2],
            array.reshape(2, 5),
            array.view("u8"),
            array.view("M8[s]"),
        ]
    )
    assert halves[0].tolist() == [0, 1, 2, 3, 4]
    assert halves[1].tolist() == [5, 6, 7, 8, 9]
    assert halves[2].tolist() == [0, 2, 4, 6, 8]
    assert halves[3].shape == (2, 5)
    assert halves[4].dtype == np.uint64
    assert halves[5].dtype.kind == "M"


def test_long_lists_are_read_item_by_item() -> None:
    items = [{"id": i, "x": torch.full((2,), float(i)), "tags": [str(i)]} for i in range(1500)]
    back = there_and_back({"items": items, "words": [str(i) for i in range(1024)], "short": [1, 2]})
    assert type(back["short"]) is list
    assert isinstance(back["items"], PackedList)
    assert len(back["items"]) == 1500
    assert back["items"][-1]["x"].tolist() == [1499.0, 1499.0]
    assert back["items"][0] is not back["items"][0]
    assert [item["id"] for item in back["items"][10:20:3]] == [10, 13, 16, 19]
    assert list(back["words"]) == [str(i) for i in range(1024)]
    assert back["words"].index("1023") == 1023
    assert "absent" not in back["words"]
    for copied in (pickle.loads(pickle.dumps(back["words"])), copy.deepcopy(back["words"])):  # noqa: S301
        assert copied == [str(i) for i in range(1024)]
    nested = there_and_back([[list(range(2000))] * 3, list(range(1100))] * 600)
    assert nested[1199][1099] == 1099
    assert nested[1198][2][1999] == 1999


def test_lists_say_what_is_outside() -> None:
    words = there_and_back([str(i) for i in range(2000)])
    for index in (2000, -2001):
        try:
            words[index]
        except IndexError:
            continue
        raise AssertionError(index)


def test_objects_keep_their_class_and_identity() -> None:
    shared = torch.ones(3)
    dataset = TensorDataset(shared, torch.arange(3))
    back = there_and_back(OrderedDict(a=dataset, b=dataset, c=shared))
    assert type(back["a"]) is TensorDataset
    assert back["a"] is back["b"]
    assert back["a"].tensors[0] is back["c"]


def test_a_write_stays_with_the_writer() -> None:
    with tempfile.TemporaryFile() as file:
        place = pack([torch.zeros(5), np.zeros(5)], file)
        file.flush()
        first, second = unpack(file.fileno(), place), unpack(file.fileno(), place)
        first[0][1] = 7
        first[1][2] = 8
        assert second[0].sum() == second[1].sum() == 0
        assert torch.from_numpy(second[1]).sum() == 0


def test_blocks_are_aligned() -> None:
    tensors = [torch.ones(n, dtype=torch.uint8) for n in (1, 3, 65)]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in there_and_back(tensors))


def test_the_file_may_be_closed_and_deleted() -> None:
    with tempfile.NamedTemporaryFile() as file:
        place = pack(torch.arange(10), file)  # type: ignore[arg-type] # a file like any other
        file.flush()
        back = unpack(file.fileno(), place)
    assert not Path(file.name).exists()
    assert back.tolist() == list(range(10))
