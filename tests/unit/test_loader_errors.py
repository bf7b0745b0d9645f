# SPDX-License-Identifier: Apache-2.0
"""What the loader refuses, and what it says of a dataset that fails."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from small_datasets import Counting, Squares

from rankwise import session
from rankwise.data.loader import DataLoader
from rankwise.errors import ConfigurationError, DatasetError, NotJoined

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

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
