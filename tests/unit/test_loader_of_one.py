# SPDX-License-Identifier: Apache-2.0
"""The loader in a world of one: datasets of every kind, epochs, resume, errors."""

from __future__ import annotations

import json
import os
import random
import signal
import warnings
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
    random_split,
)

from rankwise import session
from rankwise.data.loader import DataLoader
from rankwise.errors import ConfigurationError, DatasetError, NotJoined
from rankwise.session import Session
from rankwise.world import World

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

ALONE = World(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node_rank=0,
    num_nodes=1,
    device="cpu",
    backend="none",
    hostname="here",
    source="nobody",
)


def joined(parts: Iterable[list[Any]]) -> list[Any]:
    return [item for part in parts for item in part]


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    session.set_current(Session(world=ALONE))
    yield
    session.set_current(None)


class Squares(Dataset[dict[str, Any]]):
    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"i": index, "square": torch.tensor([float(index**2)]), "name": str(index)}


class Counting(IterableDataset[torch.Tensor]):
    def __init__(self, length: int = 20) -> None:
        self.length = length
        self.read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.length):
            self.read += 1
            yield torch.tensor(number)


def flat(loader: DataLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


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


def test_epochs_differ_and_repeat_with_the_seed() -> None:
    def epochs(seed: int) -> list[list[list[int]]]:
        loader = DataLoader(torch.arange(20), global_batch_size=5, shuffle=True, seed=seed)
        assert len(loader) == 4
        found = []
        for epoch in range(3):
            assert loader.epoch == epoch
            found.append(flat(loader))
        return found

    first = epochs(0)
    assert all(sorted(joined(epoch)) == list(range(20)) for epoch in first)
    assert len({json.dumps(epoch) for epoch in first}) == 3
    assert epochs(0) == first
    assert epochs(1) != first


@pytest.mark.parametrize(
    "data", [torch.arange(20), list(range(20)), Counting(20)], ids=["columns", "samples", "stream"]
)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("remainder", ["keep", "drop"])
def test_resume_after_every_batch(data: Any, num_workers: int, remainder: str) -> None:
    options = {"global_batch_size": 6, "num_workers": num_workers, "remainder": remainder}
    whole = DataLoader(data, **options)
    first, second = flat(whole), flat(whole)
    running = DataLoader(data, **options)
    for taken, batch in enumerate(running, 1):
        assert batch.tolist() == first[taken - 1]
        state = json.loads(json.dumps(running.state_dict()))
        resumed = DataLoader(data, **options)
        resumed.load_state_dict(state)
        assert (resumed.epoch, state["position"]) == (0, min(6 * taken, 20))
        assert flat(resumed) == first[taken:]
        assert resumed.epoch == 1
        assert flat(resumed) == second
    assert (running.epoch, running.state_dict()["position"]) == (1, 0)


def test_resume_with_another_batch_size() -> None:
    before = DataLoader(torch.arange(20), global_batch_size=6, shuffle=True)
    order = joined(flat(DataLoader(torch.arange(20), global_batch_size=20, shuffle=True)))
    next(running := iter(before))
    next(running)
    after = DataLoader(torch.arange(20), global_batch_size=5, shuffle=True)
    after.load_state_dict(before.state_dict())
    assert flat(after) == [order[12:17], order[17:]]


def test_resume_where_less_than_a_whole_batch_is_left_to_drop() -> None:
    state = DataLoader(torch.arange(20), global_batch_size=6).state_dict() | {"position": 18}
    loader = DataLoader(torch.arange(20), global_batch_size=6, remainder="drop")
    loader.load_state_dict(state)
    assert (loader.epoch, len(list(loader))) == (0, 0)
    assert (loader.epoch, len(list(loader))) == (1, 3)


def test_leaving_early_ends_the_epoch_and_a_look_does_not() -> None:
    data = torch.arange(20)
    whole = DataLoader(data, global_batch_size=5, shuffle=True)
    epochs = [flat(whole) for _ in range(3)]
    loader = DataLoader(data, global_batch_size=5, shuffle=True)
    assert next(iter(loader)).tolist() == epochs[0][0]
    assert flat(loader) == epochs[0]
    for number, _ in enumerate(loader):
        if number == 2:
            break
    assert loader.epoch == 1
    assert loader.state_dict()["position"] == 15
    resumed = DataLoader(data, global_batch_size=5, shuffle=True)
    resumed.load_state_dict(loader.state_dict())
    assert flat(resumed) == epochs[1][3:]
    assert flat(loader) == epochs[2]


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
    with pytest.raises(ConfigurationError, match="once only"):
        DataLoader((number for number in range(3)), global_batch_size=3)
    with pytest.raises(ConfigurationError, match="neither"):
        DataLoader(3, global_batch_size=3)


class Broken(Squares):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 13:
            message = "bad pixel"
            raise KeyError(message)
        return super().__getitem__(index)


class BrokenStream(Counting):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from super().__iter__()
        message = "bad pixel"
        raise KeyError(message)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_the_dataset_names_sample_and_rank(num_workers: int) -> None:
    with pytest.raises(DatasetError, match=r"dataset\[13\] raised KeyError") as caught:
        list(DataLoader(Broken(), global_batch_size=4, num_workers=num_workers))
    assert "rank 0/1" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.args == ("bad pixel",)
    if num_workers:
        assert "in __getitem__" in str(caught.value)
    with pytest.raises(DatasetError, match="iterating the dataset") as caught:
        list(DataLoader(BrokenStream(), global_batch_size=4, num_workers=num_workers))
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(DatasetError, match="collate_fn of 4 samples raised ZeroDivisionError"):
        list(DataLoader(Squares(), global_batch_size=4, num_workers=num_workers, collate_fn=lambda _: 1 // 0))


class BrokenOnce(Squares):
    mended: Path

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 13 and not self.mended.exists():
            self.mended.touch()
            raise KeyError(index)
        return super().__getitem__(index)


def test_persistent_workers_start_anew_after_an_error(tmp_path: Path) -> None:
    data = BrokenOnce()
    data.mended = tmp_path / "mended"
    loader = DataLoader(data, global_batch_size=4, num_workers=1, persistent_workers=True)
    with pytest.raises(DatasetError):
        list(loader)
    assert len(list(loader)) == 5
    assert len(list(loader)) == 5


class Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("only one")


class BrokenOddly(Squares):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise Unpicklable(index, index)


def test_an_error_that_cannot_leave_its_worker_is_still_shown() -> None:
    with pytest.raises(DatasetError, match=r"dataset\[0\] raised Unpicklable") as caught:
        list(DataLoader(BrokenOddly(), global_batch_size=4, num_workers=1))
    assert "in __getitem__" in str(caught.value)


class Dying(Squares):
    def __getitem__(self, index: int) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_dead_worker_is_an_error() -> None:
    with pytest.raises(DatasetError, match="worker process") as caught:
        list(DataLoader(Dying(), global_batch_size=2, num_workers=1))
    assert "rank 0/1" in str(caught.value)
    assert "worker 0 ended with exit code -9 (SIGKILL)" in str(caught.value)


def test_batch_size_is_refused_with_the_two_words() -> None:
    with pytest.raises(ConfigurationError) as caught:
        DataLoader(Squares(), batch_size=4)
    assert "global_batch_size" in str(caught.value)
    assert "local_batch_size" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"drop_last": True, "global_batch_size": 4}, 'remainder="drop"'),
        ({"sampler": [1], "global_batch_size": 4}, "Subset"),
        ({"suffle": True, "global_batch_size": 4}, "shuffle"),
        ({}, "global_batch_size"),
        ({"global_batch_size": 4, "local_batch_size": 4}, "Both"),
        ({"global_batch_size": 4, "remainder": "pad"}, '"keep"'),
        ({"global_batch_size": 4, "num_workers": -1}, "num_workers"),
        ({"global_batch_size": 4, "prefetch_factor": 2}, "num_workers=1"),
        ({"global_batch_size": 4, "persistent_workers": True}, "num_workers=1"),
        ({"global_batch_size": 21, "remainder": "drop"}, "leaves nothing"),
    ],
)
def test_bad_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        DataLoader(Squares(), **options)
    assert words in str(caught.value)


def test_an_empty_dataset_and_no_world() -> None:
    with pytest.raises(DatasetError, match="empty"):
        DataLoader(Squares(0), global_batch_size=4)
    session.set_current(None)
    with pytest.raises(NotJoined):
        DataLoader(Squares(), global_batch_size=4)


def test_state_of_another_dataset_is_refused() -> None:
    state = DataLoader(Squares(20), global_batch_size=4).state_dict()
    with pytest.raises(DatasetError, match=r"dataset_length=20.*dataset_length=19"):
        DataLoader(Squares(19), global_batch_size=4).load_state_dict(state)


def test_another_device() -> None:
    for data in (torch.arange(4), Squares(4)):
        (batch,) = DataLoader(data, global_batch_size=4, device="meta")
        tensor = batch if isinstance(batch, torch.Tensor) else batch["square"]
        assert tensor.device.type == "meta"
