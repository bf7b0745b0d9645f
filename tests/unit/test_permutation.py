# SPDX-License-Identifier: Apache-2.0
"""The keyed permutation: a bijection for every length, another for every key, well mixed."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.data.epoch_order import MAX_LENGTH, Permutation


def order(n: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return Permutation(n, seed, epoch)(np.arange(n)).tolist()


@pytest.mark.parametrize("n", [*range(301), 4095, 4096, 4097, 65536, 99991])
def test_is_a_bijection(n: int) -> None:
    assert sorted(order(n, seed=n, epoch=3)) == list(range(n))


@given(n=st.integers(1, 20000), seed=st.integers(), epoch=st.integers())
def test_is_a_bijection_for_any_key(n: int, seed: int, epoch: int) -> None:
    assert sorted(order(n, seed, epoch)) == list(range(n))


@given(n=st.integers(1, MAX_LENGTH), seed=st.integers(), data=st.data())
def test_stays_within_any_length_and_separates_positions(n: int, seed: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True))
    samples = Permutation(n, seed)(np.array(positions)).tolist()
    assert len(set(samples)) == len(positions)
    assert all(0 <= sample < n for sample in samples)


def test_is_the_same_order_for_ever() -> None:
    """Checkpoints hold positions: in another order a resumed epoch would repeat samples."""
    assert order(10, seed=1, epoch=2) == [8, 5, 1, 7, 3, 0, 2, 4, 6, 9]
    large = Permutation(10**8, seed=5, epoch=1)(np.array([0, 1, 7 * 10**7, 10**8 - 1]))
    assert large.tolist() == [47763489, 19510243, 17649820, 50293904]


def test_seed_and_epoch_and_sign_change_the_order() -> None:
    keys = [(0, 0), (0, 1), (1, 0), (1, 1), (-1, 0), (2**80, 0), (11, 1), (1, 11)]
    orders = {tuple(order(50, *key)) for key in keys}
    assert len(orders) == len(keys)


def test_positions_may_be_asked_for_singly_and_in_any_shape() -> None:
    permutation = Permutation(1000, 7)
    whole = permutation(np.arange(1000))
    assert [int(permutation(np.array([place]))[0]) for place in (999, 0, 500)] == whole[[999, 0, 500]].tolist()
    assert permutation(np.arange(12).reshape(3, 4)).tolist() == whole[:12].reshape(3, 4).tolist()
    assert permutation(np.arange(1000)[::-7]).tolist() == whole[::-7].tolist()
    assert permutation(np.array([], dtype=np.int64)).tolist() == []
    assert len(permutation) == 1000


def test_leaves_the_positions_as_they_were() -> None:
    positions = np.arange(100)
    Permutation(100)(positions)
    assert positions.tolist() == list(range(100))


@pytest.mark.parametrize("position", [-1, 10, 2**62])
def test_refuses_a_position_outside(position: int) -> None:
    with pytest.raises(IndexError, match=r"\[0, 10\)"):
        Permutation(10)(np.array([position]))


@pytest.mark.parametrize("n", [-1, MAX_LENGTH + 1])
def test_refuses_a_length_without_an_order(n: int) -> None:
    with pytest.raises(ValueError, match="length"):
        Permutation(n)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_order_of_a_few_is_equally_likely(n: int) -> None:
    draws = 300 * math.factorial(n)
    counts = Counter(tuple(order(n, seed)) for seed in range(draws))
    expected = draws / math.factorial(n)
    observed = [counts[each] for each in itertools.permutations(range(n))]
    assert deviation(observed, expected) < 4


@pytest.mark.parametrize("n", [7, 16, 100, 257])
def test_every_sample_is_equally_likely_at_every_position(n: int) -> None:
    draws = 1500
    counts = np.zeros((n, n))
    for seed in range(draws):
        counts[np.arange(n), order(n, seed, epoch=seed % 5)] += 1
    assert deviation(counts.ravel(), draws / n) < 4


@pytest.mark.parametrize("n", [1000, 65536, 10**6])
def test_neighbours_in_the_order_are_no_neighbours_in_the_dataset(n: int) -> None:
    """The distance of neighbours is uniform: no stretch of the dataset comes in its own order."""
    distances: list[int] = []
    for epoch in range(20):
        samples = Permutation(n, 3, epoch)(np.arange(min(n, 5000)))
        distances.extend((np.diff(samples) % n * 100 // n).tolist())
    counts = np.bincount(distances, minlength=100)
    assert deviation(counts, len(distances) / 100) < 4


def test_takes_no_memory_for_its_length() -> None:
    Permutation(10**8)(np.arange(128))
    tracemalloc.start()
    Permutation(10**8, 1)(np.arange(128))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 100_000


def deviation(observed: object, expected: float) -> float:
    """Return how many standard deviations the chi-square statistic lies above what chance gives."""
    counts = np.asarray(observed, dtype=float)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = counts.size - 1
    return float((chi_square - freedom) / math.sqrt(2 * freedom))
