# SPDX-License-Identifier: Apache-2.0
"""MONAI's datasets and transforms: the same augmentation on any number of ranks and workers."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from rankwise.comm.join import join
from rankwise.comm.leave import leave
from rankwise.data.loader import DataLoader
from rankwise.data.sampler import ShardedSampler
from rankwise.data.shared import share
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankwise.world.facts import World

SAMPLES = 7
KINDS = ("plain", "cached", "array")


def joined(parts: Iterable[list[Any]]) -> list[Any]:
    return [item for part in parts for item in part]


def volumes() -> list[dict[str, Any]]:
    return [{"image": np.arange(4**3, dtype=np.float32).reshape(1, 4, 4, 4) + 100 * i, "id": i} for i in range(SAMPLES)]


def monai_dataset(kind: str) -> Any:
    with warnings.catch_warnings():
        # MONAI warns of its own use of other packages while it loads.
        warnings.simplefilter("ignore")
        from monai import data, transforms

    transform = transforms.Compose(
        [
            transforms.ScaleIntensityd(keys="image", minv=None, maxv=None, factor=0.0),
            transforms.RandFlipd(keys="image", prob=0.5, spatial_axis=0),
            transforms.RandSpatialCropd(keys="image", roi_size=(2, 2, 2), random_size=False),
            transforms.RandGaussianNoised(keys="image", prob=1.0, std=0.1),
        ]
    )
    if kind == "cached":
        return data.CacheDataset(volumes(), transform, progress=False, num_workers=0)
    if kind == "array":
        return data.ArrayDataset([row["image"] for row in volumes()], transforms.RandGaussianNoise(prob=1.0))
    return data.Dataset(volumes(), transform)


def _rows(world: World, how: list[tuple[int, bool]]) -> list[list[Any]]:
    """Return, for each number of workers, shared copy or not, and kind of dataset, this rank's rows of all batches."""
    del world
    return [_rows_of(kind, *one) for one in how for kind in KINDS]


def _rows_of(kind: str, num_workers: int, shared_copy: bool) -> list[list[Any]]:
    from monai.data import list_data_collate

    dataset = share(lambda: monai_dataset(kind)) if shared_copy else monai_dataset(kind)
    loader = DataLoader(
        dataset,
        global_batch_size=4,
        shuffle=True,
        num_workers=num_workers,
        collate_fn=list_data_collate,
    )
    return [_flat(batch) for _ in range(2) for batch in loader]


def _flat(batch: Any) -> list[Any]:
    if isinstance(batch, torch.Tensor):
        return [row.flatten().tolist() for row in batch]
    ids = batch["id"].tolist()
    return [(i, row.flatten().tolist()) for i, row in zip(ids, batch["image"], strict=True)]


def _own_loader() -> list[int]:
    from monai.data import DataLoader as MonaiDataLoader

    dataset = monai_dataset("plain")
    loader = MonaiDataLoader(dataset, batch_sampler=ShardedSampler(dataset, global_batch_size=3, remainder="drop"))
    return [int(i) for batch in loader for i in batch["id"]]


Rows = list[list[Any]]


def _in_three_worlds(world: World, store: str) -> tuple[Rows, Rows, Rows, list[int]]:
    """Return what this rank reads in worlds of three, two and one, and samples of MONAI's own loader in that of two.

    The same processes for all of them: each takes seconds to import MONAI.
    """
    of_three = _rows(world, [(2, False)])
    leave()
    of_two: Rows = []
    of_one: Rows = []
    own: list[int] = []
    if world.rank < 2:
        with join(init_method=f"file://{store}", rank=world.rank, world_size=2, device="cpu") as two:
            of_two, own = _rows(two, [(0, False), (0, True)]), _own_loader()
    if world.rank == 0:
        with join(device="cpu") as one:
            of_one = _rows(one, [(0, False), (2, False)])
    return of_three, of_two, of_one, own


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Rows, Rows, Rows, list[int]]]:
    """What each rank read."""
    store = str(tmp_path_factory.mktemp("two") / "store")
    return [result.get() for result in run_ranks(_in_three_worlds, 3, store, timeout_seconds=150)]


def whole_batches(of_ranks: list[Rows]) -> list[list[list[list[Any]]]]:
    """Return the batches of the whole world for each way of reading, and each kind of dataset."""
    joined_ranks = [[joined(parts) for parts in zip(*one, strict=True)] for one in zip(*of_ranks, strict=True)]
    return [joined_ranks[first : first + len(KINDS)] for first in range(0, len(joined_ranks), len(KINDS))]


@pytest.mark.timeout(180)
def test_augmentation_is_the_same_on_any_ranks_and_workers(read: list[tuple[Rows, Rows, Rows, list[int]]]) -> None:
    of_three, of_two, of_one, _ = zip(*read, strict=True)
    expected, with_workers = whole_batches([of_one[0]])
    for of_kind in expected:
        assert sum(map(len, of_kind)) == 2 * SAMPLES
        assert sorted(map(str, joined(of_kind[:2]))) != sorted(map(str, joined(of_kind[2:])))
    assert with_workers == expected
    assert whole_batches(list(of_two[:2])) == [expected, expected]
    assert whole_batches(list(of_three)) == [expected]


@pytest.mark.timeout(180)
def test_the_sampler_under_monais_loader(read: list[tuple[Rows, Rows, Rows, list[int]]]) -> None:
    assert len(set(joined(ids for *_, ids in read))) == 6
