# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of global batches and the ranks' parts of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.data.shards import Shards, local_batches, make_shards, rank_slice, resolve_global_batch_size
from rankwise.errors import ConfigurationError


def shards(length: int, size: int, *, rank: int = 0, world_size: int = 1, remainder: str = "keep") -> Shards:
    return make_shards(
        length,
        global_batch_size=size,
        local_batch_size=None,
        remainder=remainder,
        rank=rank,
        world_size=world_size,
    )


def global_batches(cut: Shards, position: int) -> list[tuple[int, int]]:
    """Where each global batch begins and ends, as one rank alone takes them."""
    batches = [
        (int(batch.indices[0]), batch.stop) for batch in local_batches(cut, lambda positions: positions, 0, position)
    ]
    assert all(start == stop for (_, stop), (start, _) in pairwise(batches))
    return batches


@given(start=st.integers(0, 100), count=st.integers(0, 100), world_size=st.integers(1, 9))
def test_slices_are_contiguous_and_even(start: int, count: int, world_size: int) -> None:
    parts = [rank_slice(start, start + count, rank, world_size) for rank in range(world_size)]
    assert [position for low, high in parts for position in range(low, high)] == list(range(start, start + count))
    sizes = [high - low for low, high in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(length=st.integers(1, 200), size=st.integers(1, 40), position=st.integers(0, 200))
def test_keep_covers_all_that_is_left(length: int, size: int, position: int) -> None:
    position = min(position, length)
    batches = global_batches(shards(length, size), position)
    assert [place for start, stop in batches for place in range(start, stop)] == list(range(position, length))
    assert len(batches) == shards(length, size).num_batches(position)
    assert all(stop - start == size for start, stop in batches[:-1])


@given(length=st.integers(1, 200), size=st.integers(1, 40), position=st.integers(0, 200))
def test_drop_leaves_out_a_short_batch_only(length: int, size: int, position: int) -> None:
    length = max(length, size)
    position = min(position, length)
    cut = shards(length, size, remainder="drop")
    batches = global_batches(cut, position)
    assert all(stop - start == size for start, stop in batches)
    assert len(batches) == (length - position) // size == cut.num_batches(position)
    assert length - cut.stop(position) < size


def test_local_size_is_per_rank() -> None:
    assert resolve_global_batch_size(None, 16, 4) == 64
    assert resolve_global_batch_size(7, None, 4) == 7


@pytest.mark.parametrize(("total", "local", "word"), [(None, None, "neither was given"), (8, 2, "both were given")])
def test_exactly_one_size(total: int | None, local: int | None, word: str) -> None:
    with pytest.raises(ConfigurationError, match=word) as caught:
        resolve_global_batch_size(total, local, 2)
    assert "global_batch_size" in str(caught.value)
    assert "local_batch_size" in str(caught.value)


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "8"])
def test_sizes_are_positive_integers(size: object) -> None:
    for name in ("global_batch_size", "local_batch_size"):
        sizes = {"global_batch_size": None, "local_batch_size": None, name: size}
        with pytest.raises(ConfigurationError, match=name):
            resolve_global_batch_size(**sizes, world_size=1)


def test_fewer_samples_than_ranks_prints_the_arithmetic() -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve_global_batch_size(3, None, 4)
    text = str(caught.value)
    assert "3 samples / 4 ranks = 0.75" in text
    assert "global_batch_size=4" in text
    assert "at most 3 ranks" in text


def test_unknown_remainder_lists_the_known() -> None:
    with pytest.raises(ConfigurationError) as caught:
        shards(10, 2, remainder="pad")
    assert "'pad'" in str(caught.value)
    assert '"keep"' in str(caught.value)
    assert '"drop"' in str(caught.value)


def test_drop_that_leaves_nothing_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="leaves nothing"):
        shards(7, 8, remainder="drop")


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_rank_must_be_one_of_the_world(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigurationError, match="is not valid with world_size"):
        shards(10, 5, rank=rank, world_size=world_size)
