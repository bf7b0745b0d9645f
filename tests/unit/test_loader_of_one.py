# SPDX-License-Identifier: Apache-2.0
"""The loader in a world of one: datasets of every kind, augmentation, streams."""

from __future__ import annotations

import random
import warnings
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from small_datasets import Counting, Squares, flat, joined
from torch.utils.data import (
    Dataset,
    Subset,
    TensorDataset,
    get_worker_info,
    random_split,
)

from rankwise.data.loader import DataLoader
from rankwise.errors import ConfigurationError, DatasetError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("alone")


def test_columns_of_every_kind() -> None:
    x, y = torch.arange(10.0), np.arange(10, dtype=">i2")
    native = torch.arange(10, dtype=torch.int16)
    assert flat(DataLoader(x, global_batch_size=4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    (array,) = DataLoader(y, global_batch_size=10)
    assert torch.equal(array, native)
    assert array.dtype == torch.int16
    (pair,) = DataLoader((x, y), global_batch_size=10)
    assert type(pair) is tuple
    (named,) = DataLoader({"x": x, "y": y}, global_batch_size=10)
    assert torch.equal(named["y"], native)
    (listed,) = DataLoader(TensorDataset(x, native), global_batch_size=10)
    assert type(listed) is list
    assert torch.equal(listed[0], x)


def test_columns_and_samples_give_the_same_batches() -> None:
    data = TensorDataset(torch.rand(20, 3), torch.arange(20))

    class Own(TensorDataset):
        """A subclass may do anything in __getitem__, so it is read sample by sample."""

        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            return super().__getitem__(index)

    for dataset, own in (
        (data, Own(*data.tensors)),
        (Subset(data, [3, 1, 7, 5]), Subset(Own(*data.tensors), [3, 1, 7, 5])),
    ):
        for fast, slow in zip(
            DataLoader(dataset, global_batch_size=3, shuffle=True),
            DataLoader(own, global_batch_size=3, shuffle=True),
            strict=True,
        ):
            assert torch.equal(fast[0], slow[0])
            assert torch.equal(fast[1], slow[1])


def test_subsets_of_subsets_of_columns() -> None:
    data = torch.arange(100)
    half, _ = random_split(data, [50, 50])  # type: ignore[arg-type] # a tensor serves as a dataset here
    quarter = Subset(half, range(0, 50, 2))
    expected = [half.indices[place] for place in range(0, 50, 2)]
    assert flat(DataLoader(quarter, global_batch_size=25)) == [expected]


def test_batches_are_no_views_of_the_dataset() -> None:
    data, array = torch.zeros(8), np.zeros(8)
    for x, y in DataLoader((data, array), global_batch_size=4):
        x.add_(1)
        y.add_(1)
    assert data.sum() == array.sum() == 0


def test_read_only_arrays_are_columns_without_a_warning() -> None:
    array = np.arange(6)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert flat(DataLoader(array, global_batch_size=6)) == [list(range(6))]


def test_columns_of_different_lengths() -> None:
    with pytest.raises(DatasetError, match="different numbers"):
        DataLoader((torch.ones(3), torch.ones(4)), global_batch_size=1)


def test_lists_and_own_collate_functions_are_read_sample_by_sample() -> None:
    assert flat(DataLoader([5, 6, 7], global_batch_size=2)) == [[5, 6], [7]]
    kept = list(DataLoader(torch.arange(3), global_batch_size=2, collate_fn=lambda samples: samples))
    assert kept == [[torch.tensor(0), torch.tensor(1)], [torch.tensor(2)]]
    (batch,) = DataLoader(Squares(3), global_batch_size=3)
    assert batch["name"] == ["0", "1", "2"]
    assert batch["square"].tolist() == [[0.0], [1.0], [4.0]]


def test_getitems_reads_whole_batches() -> None:
    class AtOnce(Squares):
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[list[int]] = []

        def __getitems__(self, indices: list[int]) -> list[int]:
            self.asked.append(indices)
            return [index * 10 for index in indices]

    data = AtOnce()
    assert flat(DataLoader(data, global_batch_size=8))[2] == [160, 170, 180, 190]
    assert [len(indices) for indices in data.asked] == [8, 8, 4]
    assert flat(DataLoader(Subset(data, [1, 2]), global_batch_size=2)) == [[10, 20]]


class Noisy(Dataset[tuple[float, ...]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[float, ...]:
        return index, random.random(), np.random.rand(), float(torch.rand(()))  # noqa: NPY002


def augmented(loader: DataLoader) -> dict[int, tuple[float, ...]]:
    rows = [row for batch in loader for row in zip(*(column.tolist() for column in batch), strict=True)]
    return {int(row[0]): row[1:] for row in rows}


def test_augmentation_belongs_to_the_sample() -> None:
    in_order = DataLoader(Noisy(), global_batch_size=5)
    expected = augmented(in_order)
    assert len({value for row in expected.values() for value in row}) == 36
    assert augmented(DataLoader(Noisy(), global_batch_size=4, shuffle=True)) == expected
    assert augmented(DataLoader(Noisy(), global_batch_size=4, shuffle=True, num_workers=2)) == expected
    assert augmented(DataLoader(Noisy(), global_batch_size=4, seed=1)) != expected
    assert augmented(in_order) != expected


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("data", [Noisy(), Counting()], ids=["samples", "stream"])
def test_reading_leaves_the_training_loops_generators_alone(data: Any, num_workers: int) -> None:
    def draws(read: bool) -> list[float]:
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        torch.manual_seed(3)
        found = []
        batches = iter(DataLoader(data, global_batch_size=4, num_workers=num_workers))
        for _ in range(3):
            if read:
                next(batches)
            found += [random.random(), np.random.rand(), float(torch.rand(()))]  # noqa: NPY002
        return found

    assert draws(read=True) == draws(read=False)


def test_a_stream_that_shuffles_draws_the_same_order_again() -> None:
    class Shuffled(Counting):
        def __iter__(self) -> Iterator[torch.Tensor]:
            numbers = list(super().__iter__())
            random.shuffle(numbers)
            yield from numbers

    loader = DataLoader(Shuffled(), global_batch_size=7)
    first, second = flat(loader), flat(loader)
    assert first != second
    assert sorted(joined(second)) == list(range(20))
    other = DataLoader(Shuffled(), global_batch_size=7, num_workers=2, persistent_workers=True)
    assert [flat(other), flat(other)] == [first, second]


class DividesItself(Counting):
    """What torch's documentation has iterable datasets do under workers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        if worker is None:
            return super().__iter__()
        return islice(super().__iter__(), worker.id, None, worker.num_workers)


def test_a_stream_that_divides_itself_by_worker_is_read_once() -> None:
    options = {"global_batch_size": 3, "num_workers": 2, "persistent_workers": True}
    loader = DataLoader(DividesItself(8), **options)
    for _ in range(2):
        assert flat(loader) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_streams() -> None:
    assert flat(DataLoader(Counting(8), global_batch_size=3)) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert flat(DataLoader(Counting(8), global_batch_size=3, remainder="drop")) == [
        [0, 1, 2],
        [3, 4, 5],
    ]
    assert flat(DataLoader(Counting(6), global_batch_size=3, remainder="drop", num_workers=2)) == [
        [0, 1, 2],
        [3, 4, 5],
    ]
    with pytest.raises(TypeError):
        len(DataLoader(Counting(), global_batch_size=3))
    with pytest.raises(ConfigurationError, match="shuffle"):
        DataLoader(Counting(), global_batch_size=3, shuffle=True)
    with pytest.raises(ConfigurationError, match="only once"):
        DataLoader((number for number in range(3)), global_batch_size=3)
    with pytest.raises(ConfigurationError, match="neither"):
        DataLoader(3, global_batch_size=3)


def test_another_device() -> None:
    for data in (torch.arange(4), Squares(4)):
        (batch,) = DataLoader(data, global_batch_size=4, device="meta")
        tensor = batch if isinstance(batch, torch.Tensor) else batch["square"]
        assert tensor.device.type == "meta"
