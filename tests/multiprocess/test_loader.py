# SPDX-License-Identifier: Apache-2.0
"""The loader on several ranks: the same batches on any number of them, errors on all."""

from __future__ import annotations

import os
import random
import threading
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import rankwise as rw
from rankwise.data.loader import DataLoader
from rankwise.data.sampler import ShardedSampler
from rankwise.errors import ConfigurationError, DatasetError, PeerFailed
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rankwise.world.facts import World

WORLD_SIZES = [1, 2, 3, 4]


def joined(parts: Iterable[list[Any]]) -> list[Any]:
    return [item for part in parts for item in part]


class Augmented(Dataset[dict[str, Any]]):
    """Draws from all three generators, an amount that differs from sample to sample."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.length:
            raise IndexError(index)
        drawn = [random.random() for _ in range(1 + index % 3)]
        return {
            "index": index,
            "python": drawn[-1],
            "numpy": np.random.rand(2),  # noqa: NPY002
            "torch": torch.rand(3),
            "name": f"sample {index}",
        }


class ShuffledStream(IterableDataset[dict[str, Any]]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = list(range(self.length))
        random.shuffle(order)
        dataset = Augmented(self.length)
        return (dataset[index] for index in order)


def dataset_of(kind: str, length: int) -> Any:
    if kind == "columns":
        return TensorDataset(torch.arange(length), torch.arange(length * 3.0).reshape(length, 3))
    return {"samples": Augmented, "stream": ShuffledStream}[kind](length)


def rows_of(batch: Any) -> list[Any]:
    """Return the samples of a batch as plain values, after checking the shapes of an empty one."""
    if isinstance(batch, dict):
        assert batch["torch"].shape[1:] == (3,)
        assert batch["torch"].dtype == torch.float32
        assert batch["index"].dtype == torch.int64
        columns = [value if isinstance(value, list) else value.tolist() for value in batch.values()]
    else:
        assert batch[1].shape[1:] == (3,)
        columns = [tensor.tolist() for tensor in batch]
    return list(zip(*columns, strict=True))


def _epochs(world: World, kind: str, length: int, options: dict[str, Any], epochs: int) -> list[list[list[Any]]]:
    loader = DataLoader(dataset_of(kind, length), shuffle=kind != "stream", **options)
    return [[rows_of(batch) for batch in loader] for _ in range(epochs)]


def global_epochs(world_size: int, kind: str, length: int, epochs: int = 2, **options: Any) -> list[list[list[Any]]]:
    results = [result.get() for result in run_ranks(_epochs, world_size, kind, length, options, epochs)]
    return [[joined(parts) for parts in zip(*ranks, strict=True)] for ranks in zip(*results, strict=True)]


@pytest.mark.parametrize("kind", ["columns", "samples", "stream"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_and_augmentation_do_not_depend_on_ranks_and_workers(kind: str, num_workers: int) -> None:
    """17 samples in global batches of 5: the last has 2, so that ranks 2 and 3 get none."""
    expected = global_epochs(1, kind, 17, global_batch_size=5)
    assert sorted(row[0] for batch in expected[1] for row in batch) == list(range(17))
    assert expected[0] != expected[1]
    for world_size in (2, 3, 4):
        found = global_epochs(world_size, kind, 17, global_batch_size=5, num_workers=num_workers)
        assert found == expected, world_size


def test_remainder_drop_and_local_batch_size() -> None:
    for world_size in WORLD_SIZES:
        (epoch,) = global_epochs(world_size, "samples", 17, 1, local_batch_size=4, remainder="drop")
        assert [len(batch) for batch in epoch] == [4 * world_size] * (17 // (4 * world_size))


def _interrupted(world: World, kind: str, length: int, size: int, taken: int) -> tuple[list[Any], dict[str, Any]]:
    loader = DataLoader(dataset_of(kind, length), shuffle=kind != "stream", global_batch_size=size, seed=1)
    list(loader)
    seen: list[Any] = []
    for number, batch in enumerate(loader, 1):
        seen += rows_of(batch)
        if number == taken:
            break
    return seen, loader.state_dict()


def _resumed(world: World, kind: str, length: int, size: int, state: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    loader = DataLoader(
        dataset_of(kind, length),
        shuffle=kind != "stream",
        global_batch_size=size,
        seed=1,
        num_workers=1,
    )
    loader.load_state_dict(state)
    assert loader.epoch == 1
    rest = [row for batch in loader for row in rows_of(batch)]
    assert loader.epoch == 2
    return rest, [row for batch in loader for row in rows_of(batch)]


@pytest.mark.parametrize("kind", ["columns", "samples", "stream"])
@pytest.mark.parametrize(("before", "after"), [((3, 6), (2, 6)), ((2, 4), (4, 7)), ((1, 5), (3, 5))])
def test_resume_on_another_number_of_ranks(kind: str, before: tuple[int, int], after: tuple[int, int]) -> None:
    whole = global_epochs(1, kind, 23, 3, global_batch_size=23, seed=1)
    stopped = [result.get() for result in run_ranks(_interrupted, before[0], kind, 23, before[1], 2)]
    assert all(state == stopped[0][1] for _, state in stopped)
    resumed = [result.get() for result in run_ranks(_resumed, after[0], kind, 23, after[1], stopped[0][1])]
    seen = [row for rows, _ in stopped for row in rows]
    rest = [row for rows, _ in resumed for row in rows]
    assert sorted(seen + rest) == sorted(whole[1][0])
    assert sorted(row for _, rows in resumed for row in rows) == sorted(whole[2][0])


def _lengths(world: World, lengths: list[int]) -> None:
    DataLoader(Augmented(lengths[world.rank]), global_batch_size=4)


@pytest.mark.parametrize("lengths", [[5, 5, 6], [0, 5, 5]])
def test_lengths_that_differ_are_an_error_on_all_ranks(lengths: list[int]) -> None:
    for result in run_ranks(_lengths, 3, lengths):
        assert isinstance(result.error, DatasetError)
        text = str(result.error)
        assert "differs between ranks" in text
        assert "ranks 0-1: dataset_length=5" in text or "ranks 1-2: dataset_length=5" in text
        assert "rank 2: dataset_length=6" in text or "rank 0: dataset_length=0" in text


def test_an_empty_dataset_is_an_error_on_all_ranks() -> None:
    for result in run_ranks(_lengths, 2, [0, 0]):
        assert isinstance(result.error, DatasetError)
        assert "ranks 0-1: 0 samples" in str(result.error)


def _sampler_lengths(world: World) -> None:
    ShardedSampler(10 + world.rank, global_batch_size=4)


def _sampler(world: World) -> list[list[int]]:
    return list(ShardedSampler(10, global_batch_size=4))


def test_the_sampler_takes_its_rank_from_the_world() -> None:
    parts = [result.get() for result in run_ranks(_sampler, 3)]
    assert sorted(index for rank in parts for batch in rank for index in batch) == list(range(10))
    assert all(isinstance(result.error, DatasetError) for result in run_ranks(_sampler_lengths, 2))


def _seeds(world: World, setting: str) -> None:
    settings: dict[str, Any] = {"global_batch_size": 4, setting: 7 + world.rank}
    DataLoader(Augmented(20), **settings)


@pytest.mark.parametrize("setting", ["seed", "global_batch_size"])
def test_settings_that_differ_are_an_error_on_all_ranks(setting: str) -> None:
    for result in run_ranks(_seeds, 2, setting):
        assert isinstance(result.error, ConfigurationError)
        assert f"rank 1: {setting}=8" in str(result.error)


class NoLength(Augmented):
    def __len__(self) -> int:
        message = "index file missing"
        raise OSError(message)


def _one_cannot_tell(world: World) -> str:
    try:
        DataLoader(NoLength(5) if world.rank == 1 else Augmented(5), global_batch_size=4)
    except (OSError, PeerFailed) as error:
        text = f"{type(error).__name__}: {error}"
    # All are still together: the error is everyone's, and the world goes on.
    return text + str(rw.all_reduce(1))


def test_a_length_that_one_rank_cannot_read_is_everyones_error() -> None:
    texts = [result.get() for result in run_ranks(_one_cannot_tell, 3)]
    assert texts[1] == "OSError: index file missing3"
    for text in (texts[0], texts[2]):
        assert text.startswith("PeerFailed: Rank 1 failed")
        assert "index file missing" in text


class Failing(Augmented):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 3:
            message = "truncated image"
            raise ValueError(message)
        return super().__getitem__(index)


def _reads_all(world: World, num_workers: int) -> tuple[int, str, str]:
    try:
        batches = list(DataLoader(Failing(8), global_batch_size=8, num_workers=num_workers))
    except DatasetError as error:
        return -1, str(error), repr(error.__cause__)
    return len(batches), "", ""


def _warned_of_while_reading(world: World) -> list[str]:
    assert threading.active_count() > 1, "there is no thread that a fork could meet"
    # Recorded: what os.fork() warns of is printed where it would have to be raised.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(list(DataLoader(Augmented(9), global_batch_size=2, num_workers=2))) == 5
    return [str(one.message) for one in caught]


def test_starting_workers_beside_the_threads_of_a_rank_warns_of_nothing() -> None:
    assert [result.get() for result in run_ranks(_warned_of_while_reading, 2)] == [[], []]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_the_dataset_names_its_rank(num_workers: int) -> None:
    failed, fine = (result.get() for result in run_ranks(_reads_all, 2, num_workers))
    assert failed[0] == -1
    assert "dataset[3] raised ValueError: truncated image" in failed[1]
    assert "rank 0/2" in failed[1]
    assert failed[2] == "ValueError('truncated image')"
    assert fine[0] == 1


class WhoReads(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def _pids(world: World) -> tuple[int, set[int]]:
    loader = DataLoader(WhoReads(), global_batch_size=4, num_workers=2, persistent_workers=True)
    return os.getpid(), {int(pid) for _ in range(2) for batch in loader for pid in batch}


def test_workers_read_in_processes_of_their_own() -> None:
    for result in run_ranks(_pids, 2):
        rank, workers = result.get()
        assert len(workers) == 2
        assert rank not in workers
