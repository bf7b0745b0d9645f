# SPDX-License-Identifier: Apache-2.0
"""One copy of a dataset per node: really one, gone with its ranks, private to who writes."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from left_in_memory import held, names, names_left
from torch.utils.data import Dataset, TensorDataset

import rankwise as rw
from rankwise.data import shared
from rankwise.data.loader import DataLoader
from rankwise.data.shared import PackedList, share
from rankwise.errors import DatasetError, PeerFailed
from rankwise.testing import kill_self, run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankwise.world.facts import World

ROWS = 64
ROW_BYTES = 2**20


def joined(parts: Iterable[list[Any]]) -> list[Any]:
    return [item for part in parts for item in part]


class Mixed(Dataset[Any]):
    def __init__(self) -> None:
        self.images = torch.arange(60.0).reshape(20, 3)
        self.labels = np.arange(20)
        self.notes = [{"id": number} for number in range(1500)]

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return self.images[index], self.labels[index], self.notes[index]["id"]


def _share_mixed(world: World, as_function: bool) -> tuple[bool, Any]:
    called: list[int] = []

    def read() -> Mixed:
        called.append(world.rank)
        return Mixed()

    dataset = share(read if as_function else Mixed())
    assert type(dataset) is Mixed
    batches = [[column.tolist() for column in batch] for batch in DataLoader(dataset, global_batch_size=20)]
    in_workers = [
        [column.tolist() for column in batch] for batch in DataLoader(dataset, global_batch_size=20, num_workers=1)
    ]
    assert batches == in_workers
    return bool(called), batches[0]


@pytest.mark.parametrize("as_function", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_see_what_the_first_read(world_size: int, as_function: bool) -> None:
    values = [result.get() for result in run_ranks(_share_mixed, world_size, as_function)]
    assert [called for called, _ in values] == [as_function, *[False] * (world_size - 1)]
    columns = [joined(parts) for parts in zip(*(batch for _, batch in values), strict=True)]
    assert columns[0] == Mixed().images.tolist()
    assert columns[1] == columns[2] == list(range(20))


def _memory(world: World) -> dict[str, float]:
    dataset = share(lambda: TensorDataset(torch.ones(ROWS, ROW_BYTES, dtype=torch.uint8)))
    before = _smaps()
    assert int(dataset.tensors[0].sum()) == ROWS * ROW_BYTES
    rw.barrier()
    after = _smaps()
    rw.barrier()
    return {"shared": after["Pss_Shmem"], "own": after["Private_Dirty"] - before["Private_Dirty"]}


def _smaps() -> dict[str, float]:
    """Return this process's memory by kind, in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: 1024.0 * int(line.split()[1]) for line in lines}


def test_the_bytes_are_there_once() -> None:
    found = [result.get() for result in run_ranks(_memory, 4)]
    copy_bytes = ROWS * ROW_BYTES
    assert 0.95 * copy_bytes < sum(each["shared"] for each in found) < 1.15 * copy_bytes
    assert all(each["own"] < 0.1 * copy_bytes for each in found)


def _writes(world: World) -> tuple[list[float], int]:
    dataset = share(Mixed)
    if world.rank == 1:
        dataset.images[0] = 7
        dataset.labels[0] = 7
    rw.barrier()
    return dataset.images[0].tolist(), int(dataset.labels[0])


def test_a_write_stays_with_its_rank() -> None:
    assert [result.get() for result in run_ranks(_writes, 3)] == [
        ([0.0, 1.0, 2.0], 0),
        ([7.0, 7.0, 7.0], 7),
        ([0.0, 1.0, 2.0], 0),
    ]


def _fails(world: World, kind: str) -> str:
    def read() -> Any:
        if kind == "raises":
            message = "no such folder"
            raise FileNotFoundError(message)
        return [lambda: 1]

    try:
        share(read)
    except (OSError, DatasetError, PeerFailed) as error:
        text = f"{type(error).__name__}: {error}"
    return text + f" {rw.all_reduce(1)} {_num_open_memory_files()}"


def _num_open_memory_files() -> int:
    """Return how many descriptors of this process are ours."""
    entries = list(Path("/proc/self/fd").iterdir())
    # The directory itself was open while it was listed, and is not any more.
    links = [str(entry.readlink()) for entry in entries if entry.is_symlink()]
    return sum("rankwise-share" in link for link in links)


def test_an_error_while_reading_is_everyones() -> None:
    texts = [result.get() for result in run_ranks(_fails, 3, "raises")]
    assert texts[0] == "FileNotFoundError: no such folder 3 0"
    assert all(text.startswith("PeerFailed: Rank 0 failed") and "no such folder" in text for text in texts[1:])
    texts = [result.get() for result in run_ranks(_fails, 2, "lambda")]
    assert texts[0].startswith("DatasetError: The dataset cannot be pickled")
    assert "lambda" in texts[1]
    assert all(text.endswith(" 2 0") for text in texts)


def _descriptors(world: World) -> tuple[int, int]:
    dataset = share(Mixed)
    assert len(dataset) == 20
    in_use = _num_open_memory_files()
    del dataset
    gc.collect()
    return in_use, _num_open_memory_files()


def test_a_mapping_keeps_one_descriptor_and_gives_it_back() -> None:
    assert [result.get() for result in run_ranks(_descriptors, 3)] == [(1, 0)] * 3


def _killed(world: World) -> None:
    dataset = share(lambda: torch.ones(ROWS, ROW_BYTES, dtype=torch.uint8))
    dataset.sum()
    rw.barrier()
    kill_self()


def test_kill_nine_leaves_nothing() -> None:
    before = names()
    run_ranks(_killed, 3)
    assert held() == [], "the memory is freed"
    assert names_left(before) == set()


def _cannot_reach(world: World) -> tuple[bool, list[str]]:
    said: list[str] = []
    shared.warn = lambda message, **_: said.append(message)  # type: ignore[assignment]
    if world.rank == 1:

        def refused(_: object) -> int:
            raise PermissionError(13, "Permission denied")

        shared._found = refused  # type: ignore[assignment]
    dataset = share(Mixed)
    return isinstance(dataset.notes, PackedList), said


def test_a_rank_that_cannot_map_takes_its_own_with_a_warning() -> None:
    values = [result.get() for result in run_ranks(_cannot_reach, 3)]
    assert [packed for packed, _ in values] == [True, False, True]
    assert [len(said) for _, said in values] == [0, 1, 0]
    assert "Permission denied" in values[1][1][0]


def _other_file(world: World) -> str:
    file = os.memfd_create("another")
    os.write(file, b"x" * 100)
    try:
        shared._found(shared._Published(0, os.getpid(), file, (0, 10), (b"y" * 16).hex()))
    except OSError as error:
        return str(error)
    finally:
        os.close(file)
    return "taken"


def test_another_file_under_the_same_number_is_not_taken() -> None:
    assert "is not the file" in run_ranks(_other_file, 1)[0].get()
