# SPDX-License-Identifier: Apache-2.0
"""Seeds of samples: a function of seed, epoch and index; the process's generators are kept."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset

from rankwise.data.epoch_order import sample_seeds
from rankwise.data.sources import (
    generators_kept,
    owners_of_generators,
    seed_generators,
)


def draws() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), np.random.randn(), float(torch.rand(()))  # noqa: NPY002


@given(
    seed=st.integers(),
    epoch=st.integers(0, 10**6),
    indices=st.lists(st.integers(0, 2**62), min_size=2),
)
def test_seed_of_a_sample_does_not_depend_on_its_neighbours(seed: int, epoch: int, indices: list[int]) -> None:
    together = sample_seeds(seed, epoch, np.array(indices))
    assert together.dtype == np.uint32
    assert together.tolist() == [int(sample_seeds(seed, epoch, np.array([index]))[0]) for index in indices]


def test_seeds_differ_by_sample_epoch_and_seed() -> None:
    seeds = np.concatenate([sample_seeds(seed, epoch, np.arange(1000)) for seed in (0, 1, -1) for epoch in (0, 1)])
    assert len(np.unique(seeds)) > 5990


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (np.random.default_rng(), lambda one: float(one.random())),
        (np.random.RandomState(), lambda one: float(one.random())),
        (random.Random(), lambda one: one.random()),
        (torch.Generator(), lambda one: float(torch.rand((), generator=one))),
    ],
    ids=["numpy", "old numpy", "python", "torch"],
)
def test_generators_that_are_attributes_are_seeded(generator: Any, draw: Any) -> None:
    dataset = Augmented()
    vars(dataset)["own"] = generator
    owners = [one for one in owners_of_generators(Subset(dataset, [0])) if one is not dataset.transform]
    drawn = []
    for seed in (4, 4, 5):
        seed_generators(seed, owners)
        drawn.append(draw(generator))
    assert drawn[0] == drawn[1] != drawn[2]


def test_sets_all_three_generators_and_forgets_half_drawn_pairs() -> None:
    seed_generators(5)
    first = draws()
    seed_generators(5)
    assert draws() == first
    seed_generators(6)
    assert not set(draws()) & set(first)


def draw_and_fail() -> None:
    with generators_kept():
        seed_generators(9)
        draws()
        1 / 0  # noqa: B018


def test_generators_are_put_back_even_after_an_error() -> None:
    seed_generators(1)
    draws()
    expected = []
    with generators_kept():
        expected = [draws(), draws()]
    with pytest.raises(ZeroDivisionError):
        draw_and_fail()
    assert [draws(), draws()] == expected


class Owner:
    def __init__(self) -> None:
        self.seeds: list[int] = []

    def set_random_state(self, seed: int) -> None:
        self.seeds.append(seed)


class Augmented(Dataset[int]):
    def __init__(self) -> None:
        self.transform = Owner()

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 4


def test_finds_transforms_under_wrappers_once() -> None:
    one, two = Augmented(), Augmented()
    owners = owners_of_generators(Subset(ConcatDataset([one, two, one]), [0, 1]))
    assert sorted(map(id, owners)) == sorted(map(id, (one.transform, two.transform)))
    seed_generators(7, owners)
    assert one.transform.seeds == two.transform.seeds == [7]
    assert owners_of_generators([1, 2]) == []
