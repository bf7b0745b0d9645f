# SPDX-License-Identifier: Apache-2.0
"""The sampler: every sample once, the same batches on any number of ranks, resumed anywhere."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from rankwise.data.sampler import ShardedSampler
from rankwise.errors import ConfigurationError, DatasetError, NotJoined

if TYPE_CHECKING:
    from collections.abc import Iterable

LENGTHS = st.integers(1, 120)
RANKS = st.integers(1, 8)


def joined(parts: Iterable[list[Any]]) -> list[Any]:
    return [item for part in parts for item in part]


def samplers(length: int, world_size: int, **options: object) -> list[ShardedSampler]:
    return [ShardedSampler(length, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def global_batches(ranks: list[ShardedSampler]) -> list[list[int]]:
    """Iterate one epoch on all ranks and return the global batches, part after part."""
    return [joined(parts) for parts in zip(*ranks, strict=True)]


@given(
    length=LENGTHS,
    world_size=RANKS,
    size=st.integers(1, 30),
    shuffle=st.booleans(),
    seed=st.integers(),
)
def test_every_sample_exactly_once_each_epoch(
    length: int, world_size: int, size: int, shuffle: bool, seed: int
) -> None:
    ranks = samplers(length, world_size, global_batch_size=max(size, world_size), shuffle=shuffle, seed=seed)
    for _ in range(2):
        assert sorted(joined(global_batches(ranks))) == list(range(length))


@given(length=LENGTHS, world_size=RANKS, local=st.integers(1, 10))
def test_local_batch_size_is_what_each_rank_gets(length: int, world_size: int, local: int) -> None:
    ranks = samplers(length, world_size, local_batch_size=local)
    batches = [list(rank) for rank in ranks]
    assert sorted(itertools.chain(*itertools.chain(*batches))) == list(range(length))
    assert all(len(batch) == local for rank in batches for batch in rank[:-1])


@given(length=LENGTHS, size=st.integers(8, 40), world_size=RANKS)
def test_every_batch_is_split_as_evenly_as_possible(length: int, size: int, world_size: int) -> None:
    for parts in zip(*samplers(length, world_size, global_batch_size=size), strict=True):
        numbers = [len(part) for part in parts]
        assert numbers == sorted(numbers, reverse=True)
        assert max(numbers) - min(numbers) <= 1


@given(
    length=LENGTHS,
    size=st.integers(8, 40),
    remainder=st.sampled_from(["keep", "drop"]),
    world_size=RANKS,
)
def test_batches_do_not_depend_on_the_number_of_ranks(length: int, size: int, remainder: str, world_size: int) -> None:
    length = max(length, size)
    alone, many = (samplers(length, n, global_batch_size=size, remainder=remainder) for n in (1, world_size))
    for _ in range(2):
        expected = global_batches(alone)
        assert global_batches(many) == expected
        assert len(expected) == len(alone[0]) == len(many[-1])


@given(
    length=LENGTHS,
    before=st.tuples(RANKS, st.integers(8, 40)),
    after=st.tuples(RANKS, st.integers(8, 40)),
    data=st.data(),
)
def test_resume_yields_exactly_what_is_left(
    length: int, before: tuple[int, int], after: tuple[int, int], data: st.DataObject
) -> None:
    ranks = samplers(length, before[0], global_batch_size=before[1], seed=4)
    taken = data.draw(st.integers(1, len(ranks[0])))
    running = [iter(rank) for rank in ranks]
    seen = [index for _ in range(taken) for rank in running for index in next(rank)]
    states = [json.dumps(rank.state_dict()) for rank in ranks]
    assert len(set(states)) == 1

    resumed = samplers(length, after[0], global_batch_size=after[1], seed=4)
    for rank in resumed:
        rank.load_state_dict(json.loads(states[0]))
    rest = joined(global_batches(resumed))
    assert sorted(seen + rest) == list(range(length))
    whole = samplers(length, 1, global_batch_size=8, seed=4)
    assert seen + rest == joined(global_batches(whole))
    assert [rank.epoch for rank in resumed] == [1] * len(resumed)
    fresh = samplers(length, 1, global_batch_size=after[1], seed=4)
    global_batches(fresh)
    assert global_batches(resumed) == global_batches(fresh)


def test_the_epoch_advances_by_itself() -> None:
    sampler = ShardedSampler(100, global_batch_size=10, rank=0, world_size=1)
    assert sampler.epoch == 0
    first = list(sampler)
    assert sampler.epoch == 1
    assert list(sampler) != first
    assert sampler.epoch == 2


def test_an_epoch_left_early_is_over_but_a_look_is_not() -> None:
    whole = ShardedSampler(40, global_batch_size=10, rank=0, world_size=1)
    epochs = [list(whole) for _ in range(3)]

    sampler = ShardedSampler(40, global_batch_size=10, rank=0, world_size=1)
    assert next(iter(sampler)) == epochs[0][0]
    assert list(sampler) == epochs[0]
    running = iter(sampler)
    assert [next(running), next(running)] == epochs[1][:2]
    assert sampler.state_dict()["epoch"] == 1
    assert sampler.state_dict()["position"] == 20
    assert list(sampler) == epochs[2]
    next(running, None)
    assert sampler.epoch == 3


def test_a_look_after_loading_does_not_lose_the_place() -> None:
    sampler = ShardedSampler(40, global_batch_size=10, rank=0, world_size=1)
    whole = list(sampler)
    resumed = ShardedSampler(40, global_batch_size=10, rank=0, world_size=1)
    resumed.load_state_dict({"dataset_length": 40, "seed": 0, "shuffle": True, "epoch": 0, "position": 20})
    next(iter(resumed))
    assert list(resumed) == whole[2:]


def test_under_torch_loader_with_and_without_workers() -> None:
    data = TensorDataset(torch.arange(23.0))
    sampler = ShardedSampler(data, global_batch_size=6, rank=0, world_size=1, seed=3)
    plain = ShardedSampler(data, global_batch_size=6, rank=0, world_size=1, seed=3)
    with_workers = DataLoader(data, batch_sampler=sampler, num_workers=1)
    assert len(with_workers) == 4
    for _ in range(2):
        expected = [[float(index) for index in batch] for batch in plain]
        assert [batch.tolist() for (batch,) in with_workers] == expected


def test_the_state_after_the_last_batch_is_the_end_of_the_epoch() -> None:
    sampler = ShardedSampler(25, global_batch_size=10, rank=0, world_size=1)
    places = []
    state = sampler.state_dict()
    for _ in sampler:
        state = sampler.state_dict()
        places.append((state["epoch"], state["position"]))
    assert places == [(0, 10), (0, 20), (0, 25)]

    resumed = ShardedSampler(25, global_batch_size=10, rank=0, world_size=1)
    resumed.load_state_dict(state)
    assert list(resumed) == [], "what follows the loop in the script is still to come"
    assert resumed.epoch == 1
    assert list(resumed) == list(sampler)


def test_an_iteration_that_another_has_replaced_no_longer_counts() -> None:
    sampler = ShardedSampler(40, global_batch_size=10, rank=0, world_size=1)
    old = iter(sampler)
    next(old)
    new = iter(sampler)
    next(new)
    assert len(list(old)) == 3
    assert (sampler.epoch, sampler.state_dict()["position"]) == (0, 10)


def test_state_counts_the_loop_where_a_loader_reads_ahead() -> None:
    sampler = ShardedSampler(100, global_batch_size=10, rank=0, world_size=1)
    list(sampler)
    assert sampler.state_dict(num_batches=0) | {"position": 0} == sampler.state_dict(num_batches=3) | {"position": 0}
    state = sampler.state_dict(num_batches=3)
    assert (state["epoch"], state["position"]) == (0, 30)
    state = sampler.state_dict(num_batches=10)
    assert (state["epoch"], state["position"]) == (0, 100)
    with pytest.raises(ConfigurationError, match="11 batches"):
        sampler.state_dict(num_batches=11)


def test_state_of_another_dataset_or_order_is_refused() -> None:
    sampler = ShardedSampler(100, global_batch_size=10, rank=0, world_size=1, seed=1)
    state = sampler.state_dict()
    with pytest.raises(DatasetError, match=r"dataset_length=90.*dataset_length=100"):
        sampler.load_state_dict(state | {"dataset_length": 90})
    with pytest.raises(ConfigurationError, match="seed=2"):
        sampler.load_state_dict(state | {"seed": 2})
    with pytest.raises(ConfigurationError, match="shuffle=False"):
        sampler.load_state_dict(state | {"shuffle": False})
    with pytest.raises(ConfigurationError, match="has no epoch, position"):
        sampler.load_state_dict({"dataset_length": 100, "seed": 1, "shuffle": True})
    for place in (
        {"position": 101},
        {"position": -1},
        {"position": 1.5},
        {"epoch": -1},
        {"epoch": "1"},
    ):
        with pytest.raises(ConfigurationError, match=r"Position .* does not exist"):
            sampler.load_state_dict(state | place)


def test_bad_arguments() -> None:
    with pytest.raises(DatasetError, match="empty"):
        ShardedSampler(0, global_batch_size=1, rank=0, world_size=1)
    with pytest.raises(ConfigurationError, match="must be given together"):
        ShardedSampler(10, global_batch_size=1, rank=0)
    with pytest.raises(NotJoined):
        ShardedSampler(10, global_batch_size=1)
