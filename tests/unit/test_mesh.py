# SPDX-License-Identifier: Apache-2.0
"""Axes: how ranks are laid out, and what is said of sizes that do not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.errors import ConfigurationError
from rankwise.world.mesh import DATA_AXES, NAMES, Axes, axes_of, nearest

SIZES = st.integers(min_value=1, max_value=4)
AXES = st.builds(Axes, worker_groups=SIZES, pp=SIZES, dp_replicate=SIZES, dp_shard=SIZES, tp=SIZES)


@given(AXES)
def test_every_rank_has_its_own_coordinates_and_neighbours_differ_in_tp(axes: Axes) -> None:
    seen = {tuple(axes.coordinate(rank, name) for name in NAMES) for rank in range(axes.world_size)}
    assert len(seen) == axes.world_size
    assert axes.ranks_along(0, "tp") == list(range(axes.tp))
    within = axes.ranks_along(0, *(name for name in NAMES if name != "worker_groups"))
    assert within == list(range(axes.world_size // axes.worker_groups)), "the first worker group is the first ranks"


@given(AXES, st.sets(st.sampled_from(NAMES)))
def test_groups_hold_every_rank_once(axes: Axes, names: set[str]) -> None:
    groups = axes.groups_along(*names)
    assert sorted(rank for group in groups for rank in group) == list(range(axes.world_size))
    for group in groups:
        others = {tuple(axes.coordinate(rank, name) for name in NAMES if name not in names) for rank in group}
        assert len(others) == 1
        assert axes.ranks_along(group[-1], *names) == group


@given(AXES)
def test_ranks_take_the_same_samples_where_they_hold_parts_of_one_copy(axes: Axes) -> None:
    for group in axes.groups_along("pp", "tp"):
        assert len({axes.data_rank(rank) for rank in group}) == 1
    for group in axes.groups_along(*DATA_AXES):
        assert [axes.data_rank(rank) for rank in group] == list(range(axes.data_world_size))


def test_one_axis_takes_what_is_left() -> None:
    assert axes_of(8, {"dp_replicate": -1, "tp": 2}) == Axes(dp_replicate=4, tp=2)
    assert axes_of(1, {}) == Axes()
    assert str(Axes(pp=2, tp=4)) == "pp=2, tp=4"


@pytest.mark.parametrize(
    ("world_size", "sizes", "words"),
    [
        (4, {"dp_replicate": 3, "tp": 2}, "pass mesh(dp_replicate=2, tp=2), or start 6 ranks"),
        (6, {"tp": 4, "pp": -1}, "pass mesh(tp=3, pp=2), or start 8 ranks"),
        (2, {"tp": 0}, "must be an int >= 1, or -1, got 0"),
        (2, {"tp": True}, "must be an int >= 1, or -1, got True"),
        (4, {"tp": -1, "pp": -1}, "only one axis"),
        (3, {}, "pass mesh(dp_replicate=3)"),
    ],
)
def test_sizes_that_do_not_fit_are_answered_with_ones_that_do(
    world_size: int, sizes: dict[str, int], words: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        axes_of(world_size, sizes)
    assert words in str(caught.value)


@given(st.integers(min_value=1, max_value=24), st.dictionaries(st.sampled_from(NAMES), SIZES))
def test_the_nearest_sizes_fit(world_size: int, sizes: dict[str, int]) -> None:
    assert axes_of(world_size, nearest(world_size, sizes)).world_size == world_size
