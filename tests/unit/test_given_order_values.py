# SPDX-License-Identifier: Apache-2.0
"""Samplers as the order of an epoch: which are refused, and that resuming finds the same order."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from small_datasets import Counting, flat, joined
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler, WeightedRandomSampler

from rankwise.data.loader import DataLoader
from rankwise.data.sampler import ShardedSampler
from rankwise.data.sampler_order import GivenOrder
from rankwise.errors import ConfigurationError, DatasetError

pytestmark = pytest.mark.usefixtures("alone")
DATA = torch.arange(20)


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.arange(1.0, 21.0), 15)


class WithEpoch:
    """Rotates by the epoch that set_epoch() was given, as samplers of torch.distributed's kind do."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        return iter([self.epoch, 5, 6, 7])


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ([], "length of 0"),
        (iter([1]), "must have __iter__ and __len__"),
        (7, "must have __iter__ and __len__"),
        (BatchSampler(SequentialSampler(DATA), 4, drop_last=False), "yields batches"),
        (DistributedSampler(DATA, num_replicas=2, rank=0), "one rank's share"),
    ],
)
def test_an_object_that_cannot_order_an_epoch_is_refused(sampler: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        DataLoader(DATA, global_batch_size=4, sampler=sampler)


class Gives:
    def __init__(self, given: list[Any], length: int) -> None:
        self._given = given
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Any:
        return iter(self._given)


class Fails(Gives):
    def __iter__(self) -> Any:
        message = "no weights"
        raise ValueError(message)


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (Gives([1, 2], 3), "gave 2 indices, but its length is 3"),
        (Gives([1, 20], 2), "gave index 20 at position 1, but the dataset has 20"),
        (Gives([-1], 1), "gave index -1"),
        (Gives([[1, 2]], 1), "got a list"),
        (Fails([], 3), "raised ValueError: no weights"),
    ],
)
def test_wrong_indices_are_an_error(sampler: Any, words: str) -> None:
    with pytest.raises(DatasetError, match=words):
        list(DataLoader(DATA, global_batch_size=4, sampler=sampler))


def test_a_sampler_of_a_stream_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="sampler= needs a dataset that can be indexed"):
        DataLoader(Counting(), global_batch_size=4, sampler=[1])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_resume_after_every_batch(num_workers: int) -> None:
    options: dict[str, Any] = {"global_batch_size": 4, "num_workers": num_workers}
    data = list(range(20))
    whole = DataLoader(data, sampler=weighted(), **options)
    assert len(whole) == 4
    first, second = flat(whole), flat(whole)
    assert first != second
    running = DataLoader(data, sampler=weighted(), **options)
    for taken, _ in enumerate(running, 1):
        resumed = DataLoader(data, sampler=weighted(), **options)
        resumed.load_state_dict(json.loads(json.dumps(running.state_dict())))
        assert flat(resumed) == first[taken:]
        assert flat(resumed) == second


def test_a_state_of_another_order_is_refused() -> None:
    without = DataLoader(DATA, global_batch_size=4)
    with_one = DataLoader(DATA, global_batch_size=4, sampler=weighted())
    for loader, state in ((without, with_one.state_dict()), (with_one, without.state_dict())):
        with pytest.raises(ConfigurationError, match="sampler_length"):
            loader.load_state_dict(state)
    next(batches := iter(with_one))
    next(batches)
    other = DataLoader(DATA, global_batch_size=4, sampler=WeightedRandomSampler(torch.ones(20), 15))
    other.load_state_dict(with_one.state_dict())
    with pytest.raises(DatasetError, match="a different order for epoch 0 than when the state was saved"):
        list(other)


def test_set_epoch_is_called_and_generators_are_restored() -> None:
    own = torch.Generator().manual_seed(3)
    sampler = WeightedRandomSampler(torch.ones(20), 15, generator=own)
    before = own.get_state().tolist()
    order = GivenOrder(sampler, 20, 0)
    assert order.of_epoch(0).tolist() != order.of_epoch(1).tolist()
    assert own.get_state().tolist() == before
    assert GivenOrder(weighted(), 20, 0).of_epoch(1).tolist() == GivenOrder(weighted(), 20, 0).of_epoch(1).tolist()
    assert GivenOrder(weighted(), 20, 0).of_epoch(1).tolist() != GivenOrder(weighted(), 20, 1).of_epoch(1).tolist()
    loader = DataLoader(DATA, global_batch_size=2, sampler=WithEpoch())
    assert [joined(flat(loader)) for _ in range(2)] == [[0, 5, 6, 7], [1, 5, 6, 7]]


def test_the_sampler_resumes_too() -> None:
    whole = list(ShardedSampler(20, global_batch_size=4, sampler=weighted()))
    running = ShardedSampler(20, global_batch_size=4, sampler=weighted())
    batches = iter(running)
    next(batches)
    next(batches)
    resumed = ShardedSampler(20, global_batch_size=4, sampler=weighted())
    resumed.load_state_dict(running.state_dict())
    assert list(resumed) == whole[2:]
