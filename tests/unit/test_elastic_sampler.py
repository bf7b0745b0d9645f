# SPDX-License-Identifier: Apache-2.0
"""``hvd.elastic.ElasticSampler``: whose sample is whose, and what is left of an epoch on other ranks."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from rankwise.compat.horovod.elastic import sampler
from rankwise.compat.horovod.elastic.sampler import ElasticSampler

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Return what makes this process one rank of several."""

    def as_rank(rank: int, size: int) -> None:
        monkeypatch.setattr(sampler, "rank", lambda: rank)
        monkeypatch.setattr(sampler, "size", lambda: size)

    return as_rank


def of_all(become: Callable[[int, int], None], size: int, length: int, **state: int) -> list[list[int]]:
    """Return what each rank of ``size`` iterates."""
    parts: list[list[int]] = []
    for rank in range(size):
        become(rank, size)
        one = ElasticSampler(range(length), seed=5)
        if state:
            one.load_state_dict(state)
        parts.append(list(one))
        assert len(one) == len(parts[-1])
    return parts


def shuffled(length: int, seed: int) -> list[int]:
    order = list(range(length))
    random.Random(seed).shuffle(order)
    return order


def test_the_order_is_that_of_horovod(become: Callable[[int, int], None]) -> None:
    order = shuffled(11, 5)
    order += order[:1]
    assert of_all(become, 3, 11) == [order[rank::3] for rank in range(3)]


def test_an_epoch_has_an_order_of_its_own_or_none(become: Callable[[int, int], None]) -> None:
    become(0, 1)
    one = ElasticSampler(range(7), seed=5)
    one.set_epoch(2)
    assert list(one) == shuffled(7, 7)
    assert list(ElasticSampler(range(7), shuffle=False)) == list(range(7))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_rest_is_divided_again(become: Callable[[int, int], None], size: int) -> None:
    become(1, 3)
    before = ElasticSampler(range(20), seed=5)
    for batch in range(2):
        before.record_batch(batch, 2)
    assert before.state_dict() == {"epoch": 0, "processed_num": 12}
    parts = of_all(become, size, 20, **before.state_dict())
    assert sorted(index for part in parts for index in part) == sorted(shuffled(20, 5)[12:])


def test_a_new_epoch_begins_with_all_samples(become: Callable[[int, int], None]) -> None:
    become(0, 2)
    one = ElasticSampler(range(10), seed=5)
    one.record_batch(0, 3)
    one.set_epoch(1)
    assert one.state_dict() == {"epoch": 1, "processed_num": 0}
    assert len(one) == 5


@pytest.mark.parametrize(("left", "expected"), [(1, [[7], [7], [7]]), (0, [[], [], []])])
def test_fewer_samples_than_ranks(become: Callable[[int, int], None], left: int, expected: list[list[int]]) -> None:
    parts = of_all(become, 3, 8, epoch=0, processed_num=8 - left)
    assert parts == [[shuffled(8, 5)[-1]] * len(part) for part in expected]
