# SPDX-License-Identifier: Apache-2.0
"""MONAI's datasets and transforms: the same augmentation on any number of ranks and workers."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

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


def _rows_and_own_loader(world: World, how: list[tuple[int, bool]]) -> tuple[list[list[Any]], list[int]]:
    return _rows(world, how), _own_loader()


@pytest.fixture(scope="module")
def two_ranks() -> list[tuple[list[list[Any]], list[int]]]:
    """Rows read without workers, of a dataset of one's own and of a shared one, and samples of MONAI's own loader.

    One world for both tests: each rank takes seconds to import MONAI.
    """
    return [result.get() for result in run_ranks(_rows_and_own_loader, 2, [(0, False), (0, True)])]


def batches(world_size: int, *how: tuple[int, bool]) -> list[list[list[list[Any]]]]:
    """Return the batches of the whole world for each of ``how``, and each kind of dataset."""
    return whole_batches([result.get() for result in run_ranks(_rows, world_size, list(how))])


def whole_batches(of_ranks: list[list[list[Any]]]) -> list[list[list[list[Any]]]]:
    """Join the rows of all ranks."""
    joined_ranks = [[joined(parts) for parts in zip(*one, strict=True)] for one in zip(*of_ranks, strict=True)]
    return [joined_ranks[first : first + len(KINDS)] for first in range(0, len(joined_ranks), len(KINDS))]


@pytest.mark.timeout(180)
def test_augmentation_is_the_same_on_any_ranks_and_workers(two_ranks: list[tuple[list[list[Any]], list[int]]]) -> None:
    expected, with_workers = batches(1, (0, False), (2, False))
    for of_kind in expected:
        assert sum(map(len, of_kind)) == 2 * SAMPLES
        assert sorted(map(str, joined(of_kind[:2]))) != sorted(map(str, joined(of_kind[2:])))
    assert with_workers == expected
    assert whole_batches([rows for rows, _ in two_ranks]) == [expected, expected]
    assert batches(3, (2, False)) == [expected]


@pytest.mark.timeout(180)
def test_the_sampler_under_monais_loader(two_ranks: list[tuple[list[list[Any]], list[int]]]) -> None:
    assert len(set(joined(ids for _, ids in two_ranks))) == 6
