# SPDX-License-Identifier: Apache-2.0
"""What the loader refuses, and what it says of a dataset that fails."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from small_datasets import Counting, Squares
from torch.utils.data import BatchSampler, DistributedSampler, TensorDataset

from rankwise.comm import session
from rankwise.data.loader import DataLoader
from rankwise.errors import ConfigurationError, DatasetError, NotJoined

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("alone")


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


class Unequal(Squares):
    def __getitem__(self, index: int) -> Any:
        pixels = None if index == 6 else torch.zeros(3, 5 if index == 5 else 4)
        return {"pixels": pixels, "label": index}


def test_numbers_of_numpy_are_numbers() -> None:
    sizes = {"num_workers": np.int64(1), "timeout_seconds": np.float32(60), "prefetch_factor": np.int64(2)}
    loader = DataLoader(Squares(), global_batch_size=4, **sizes)  # type: ignore[arg-type]
    assert len(list(loader)) == len(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_that_do_not_fit_together_are_named_with_their_shapes(num_workers: int) -> None:
    with pytest.raises(DatasetError, match="collate_fn of 4 samples raised") as caught:
        list(DataLoader(Unequal(), global_batch_size=4, num_workers=num_workers))
    evidence = (caught.value.evidence or "").splitlines()
    assert evidence[:3] == [
        "dataset[4], dataset[7]: {'pixels': float32[3, 4], 'label': int}",
        "dataset[5]: {'pixels': float32[3, 5], 'label': int}",
        "dataset[6]: {'pixels': None, 'label': int}",
    ]


class WholeBatches(Squares):
    def __getitems__(self, indices: list[int]) -> Any:
        return torch.tensor(indices)


def test_a_batch_of_a_dataset_need_not_be_a_list() -> None:
    data = WholeBatches(8)
    batches = list(DataLoader(data, global_batch_size=4, collate_fn=lambda batch: batch))
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(DatasetError, match="collate_fn of a Tensor raised ZeroDivisionError"):
        list(DataLoader(data, global_batch_size=4, collate_fn=lambda _: 1 // 0))


class UnequalStream(Counting):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (torch.zeros(1), torch.zeros(2))


def test_samples_of_a_stream_are_named_by_their_place_in_the_batch() -> None:
    with pytest.raises(DatasetError) as caught:
        list(DataLoader(UnequalStream(), global_batch_size=2))
    assert caught.value.evidence == "sample 0 of the batch: float32[1]\nsample 1 of the batch: float32[2]"


class BrokenOnce(Squares):
    mended: Path

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 13 and not self.mended.exists():
            self.mended.touch()
            raise KeyError(index)
        return super().__getitem__(index)


def test_persistent_workers_restart_after_an_error(tmp_path: Path) -> None:
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
    assert "worker 0 exited with code -9 (SIGKILL)" in str(caught.value)
    assert "out-of-memory" in (caught.value.do or "")


class WithoutSharedMemory(Squares):
    """What a worker meets where /dev/shm is full: the kernel's signal, or torch's error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.text:
            raise RuntimeError(self.text)
        os.kill(os.getpid(), signal.SIGBUS)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)",
        "unable to write to file </torch_1_2_0>: No space left on device (28)",
    ],
)
def test_a_worker_without_shared_memory_names_its_size_and_the_fix(text: str) -> None:
    # A stub: to make /dev/shm small takes a container.
    with pytest.raises(DatasetError) as caught:
        list(DataLoader(WithoutSharedMemory(text), global_batch_size=2, num_workers=1))
    assert re.search(r"shm, which batches of workers pass through, has \d+ MiB, \d+ free", str(caught.value))
    assert "--shm-size" in (caught.value.do or "")


class Exiting(Squares):
    def __getitem__(self, index: int) -> dict[str, Any]:
        sys.exit(3)


def test_a_worker_that_was_left_by_exit_is_not_said_to_be_out_of_memory() -> None:
    with pytest.raises(DatasetError, match="exited before it had read its batch") as caught:
        list(DataLoader(Exiting(), global_batch_size=2, num_workers=1))
    assert caught.value.evidence == "worker 0 exited with code 3"
    assert "sys.exit()" in (caught.value.do or "")


class NeverReady(Squares):
    def __getitem__(self, index: int) -> dict[str, Any]:
        signal.pause()
        return super().__getitem__(index)


def test_workers_that_do_not_answer_are_not_said_to_have_died() -> None:
    with pytest.raises(DatasetError, match="did not answer in time") as caught:
        list(DataLoader(NeverReady(), global_batch_size=2, num_workers=1, timeout_seconds=1))
    assert "timed out after 1 seconds" in (caught.value.evidence or "")
    assert "timeout_seconds=" in (caught.value.do or "")


def test_batch_size_is_refused_and_the_error_names_both_alternatives() -> None:
    with pytest.raises(ConfigurationError) as caught:
        DataLoader(Squares(), batch_size=4)
    assert "global_batch_size" in str(caught.value)
    assert "local_batch_size" in str(caught.value)


def test_a_batch_size_without_its_name_is_refused_with_the_line_to_write() -> None:
    with pytest.raises(ConfigurationError, match="Only the dataset can be passed") as caught:
        DataLoader(Squares(), 32, shuffle=True)  # type: ignore[arg-type]
    assert caught.value.do == "name the batch size: rankwise.DataLoader(dataset, global_batch_size=32)"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"drop_last": True, "global_batch_size": 4}, 'remainder="drop"'),
        ({"sampler": [1], "shuffle": True, "global_batch_size": 4}, "Both shuffle"),
        ({"suffle": True, "global_batch_size": 4}, "shuffle"),
        ({}, "neither was given"),
        ({"global_batch_size": 4, "local_batch_size": 4}, "both were given"),
        ({"global_batch_size": 4, "remainder": "pad"}, '"keep"'),
        ({"global_batch_size": 4, "num_workers": -1}, "num_workers"),
        ({"global_batch_size": 4, "device": "gpu"}, "torch knows no device 'gpu'"),
        ({"global_batch_size": 4, "device": 7.5}, "torch knows no device 7.5"),
        ({"global_batch_size": 4, "prefetch_factor": 2}, "num_workers=1"),
        ({"global_batch_size": 4, "persistent_workers": True}, "num_workers=1"),
        ({"global_batch_size": 21, "remainder": "drop"}, "leaves nothing"),
        ({"global_batch_size": 4, "batch_sampler": [[1]]}, "without global_batch_size="),
        ({"shuffle": True, "batch_sampler": [[1]]}, "without shuffle="),
        ({"batch_size": None, "local_batch_size": 4}, "batch_size=None without local_batch_size="),
        ({"batch_size": None, "remainder": "drop"}, "without remainder="),
        ({"batch_sampler": 3}, "yield a list of indices"),
        ({"batch_sampler": BatchSampler(DistributedSampler(Squares(), 2, 0), 4, drop_last=True)}, "one rank's share"),
        ({"global_batch_size": 4, "sampler": BatchSampler([1], 4, drop_last=True)}, "batch_sampler="),
    ],
)
def test_bad_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        DataLoader(Squares(), **options)
    assert words in str(caught.value)


class Endless:
    """A sampler, or a batch sampler if ``item`` is a list, that repeats its item."""

    def __init__(self, item: Any) -> None:
        self._item = item

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self._item)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampler": Endless(1), "global_batch_size": 4}, "gave more indices, but its length is 4"),
        ({"batch_sampler": Endless([1, 2] * 1000)}, "has not ended after 1050000 indices of 20 samples"),
        ({"batch_sampler": [[1], []]}, "got an empty batch after 1 batches"),
        ({"batch_sampler": [1, 2]}, "got a int after 0 batches"),
        ({"batch_sampler": []}, "yields no batch"),
        ({"batch_sampler": [[1, 20]]}, "gave index 20 at position 1"),
    ],
)
def test_orders_that_are_none(options: dict[str, Any], words: str) -> None:
    loader = DataLoader(Squares(), **options)
    with pytest.raises(DatasetError, match=words):
        next(iter(loader))


@pytest.mark.parametrize("options", [{"global_batch_size": 2}, {"batch_size": None}])
def test_a_loader_of_rankwises_is_no_dataset(options: dict[str, Any]) -> None:
    inner = DataLoader(Squares(), global_batch_size=4)
    with pytest.raises(ConfigurationError, match=r"is a rankwise\.DataLoader, which already yields this rank's part"):
        DataLoader(inner, **options)


def test_torchs_loader_is_no_dataset_of_samples() -> None:
    inner = torch.utils.data.DataLoader(TensorDataset(torch.arange(12)), batch_size=4)
    with pytest.raises(ConfigurationError, match="The dataset is itself a DataLoader") as caught:
        DataLoader(inner, global_batch_size=8)
    assert "rankwise.DataLoader(loader.dataset, global_batch_size=...)" in (caught.value.do or "")
    # One that yields samples, or whose batches the script collates itself, and a dataset of batches.
    samples = torch.utils.data.DataLoader(TensorDataset(torch.arange(12)), batch_size=None)
    assert [len(x) for (x,) in DataLoader(samples, global_batch_size=8)] == [8, 4]
    joined = DataLoader(inner, global_batch_size=2, collate_fn=lambda batches: torch.cat([x for (x,) in batches]))
    assert [len(x) for x in joined] == [8, 4]
    assert [len(x) for (x,) in DataLoader(inner, batch_size=None)] == [4, 4, 4]


class Divides(Counting):
    def __iter__(self) -> Iterator[torch.Tensor]:
        message = "you need to add an explicit nodesplitter to your input pipeline for multi-node training"
        raise ValueError(message)


def test_a_stream_that_asks_for_a_nodesplitter() -> None:
    with pytest.raises(DatasetError, match="explicit nodesplitter") as caught:
        next(iter(DataLoader(Divides(), global_batch_size=2)))
    assert "pass nodesplitter=lambda urls: urls" in str(caught.value)


@pytest.mark.parametrize(
    "batch",
    [{"x": torch.ones(3, 2), "y": torch.ones(2)}, [torch.ones(3), ["a", "b"]], (torch.ones(3), Squares()), {"n": 3}],
)
def test_a_ready_batch_that_cannot_be_divided(batch: Any) -> None:
    loader = DataLoader([batch], batch_size=None, collate_fn=lambda one: one)
    with pytest.raises(DatasetError, match="cannot be divided among the ranks") as caught:
        next(iter(loader))
    assert "batch_sampler=" in str(caught.value)


def test_batches_of_any_size_have_no_size() -> None:
    loader = DataLoader(Squares(), batch_sampler=[[1], [2, 3]])
    assert (len(loader), getattr(loader, "batch_size", None)) == (2, None)
    assert not hasattr(loader, "global_batch_size")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator locks pages")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_nothing_is_pinned_without_an_accelerator(num_workers: int) -> None:
    assert len(list(DataLoader(Squares(), global_batch_size=5, pin_memory=True, num_workers=num_workers))) == 4


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
