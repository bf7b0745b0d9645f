# SPDX-License-Identifier: Apache-2.0
"""How ranks find out whether they hold the same: schedules, the store as carrier, and differences between reports."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rankwise.comm.same_state import (
    CheckSchedule,
    Posted,
    first_unlike_setting,
    listed,
    names_in_modules,
    split_by_wrapper,
    unlike_summaries,
)
from rankwise.store.client import Store


def test_comparisons_get_further_apart() -> None:
    schedule = CheckSchedule(3, 8)
    assert [step for step in range(40) if schedule.is_due(step)] == [0, 1, 2, 3, 6, 12, 20, 28, 36]
    schedule.be_patient(1024)
    assert [step for step in range(44, 80) if schedule.is_due(step)] == [44, 60, 76]


@pytest.fixture
def ranks() -> list[Posted]:
    store = Store(dist.HashStore())
    return [Posted(store.prefixed("part"), rank, [2, 5, 7]) for rank in (2, 5, 7)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize(("codes", "are_alike"), [((9, 9, 9), True), ((9, 9, 8), False), ((0, 0, 0), True)])
def test_the_last_rank_to_post_a_checksum_finds_the_difference(
    ranks: list[Posted], order: tuple[int, ...], codes: tuple[int, ...], are_alike: bool
) -> None:
    found = [ranks[place].are_alike("step 1", codes[place]) for place in order]
    assert found == [None, None, are_alike]
    assert ranks[0].are_alike("step 2", 7) is None


def test_checksums_of_thousands_of_ranks_do_not_reach_their_count() -> None:
    store = Store(dist.HashStore())
    posted = [Posted(store, rank, range(5000)) for rank in range(5000)]
    found = [one.are_alike("step", 2**32 - 1) for one in posted]
    assert found == [None] * 4999 + [True]


def test_the_last_rank_to_post_a_report_gets_all(ranks: list[Posted]) -> None:
    assert [ranks[place].reports("step", {"held": place}) for place in (1, 2)] == [None, None]
    assert ranks[0].reports("step", {"held": 0}) == {2: {"held": 0}, 5: {"held": 1}, 7: {"held": 2}}


def test_later_ranks_get_the_report_of_the_first(ranks: list[Posted]) -> None:
    assert [one.earlier("place", rank) for rank, one in enumerate(ranks)] == [None, (2, 0), (2, 0)]
    assert [one.is_first("told") for one in ranks] == [True, False, False]


def test_ranks_that_meet_get_all_reports_each_time(ranks: list[Posted]) -> None:
    met: list[dict[int, str]] = []
    for turn in "ab":
        # Each next rank posts before this one reads.
        def meet(place: int, turn: str = turn) -> None:
            if place < len(ranks):
                met.append(ranks[place].gather(f"{turn}{place}", lambda: meet(place + 1)))

        meet(0)
    assert met == [{2: "a0", 5: "a1", 7: "a2"}] * 3 + [{2: "b0", 5: "b1", 7: "b2"}] * 3


def test_the_first_setting_that_differs_is_named() -> None:
    first = [{"lr": 0.1, "eps": math.nan}, {"lr": 0.2}]
    assert first_unlike_setting([first, [{"lr": 0.1, "eps": math.nan}, {"lr": 0.2}]]) is None
    assert first_unlike_setting([first, [{"lr": 0.1}]]) is None
    assert first_unlike_setting([first, [{"lr": 0.1}], [{}, {"lr": 0.3}]]) == (1, "lr", [0.2, 0.2, 0.3])


def test_summaries_differ_by_more_than_rounding() -> None:
    rows = [
        [(1.0, 2.0), (1.0, 2.0), (3.0, 3.0), None, None],
        [(1.0 + 1e-7, 2.0), (1.1, 2.0), (3.0, 3.0), None, (0.0, 0.0)],
    ]
    assert unlike_summaries(rows, [torch.float32] * 5) == [1, 4]
    assert listed(["a"] * 6) == "a, a, a, a, a, ..."


def test_tensors_are_found_in_their_modules_and_wrappers() -> None:
    class Criterion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centers = nn.Parameter(torch.ones(2))

    class DistributedDataParallel(nn.Module):  # torch's own needs a process group
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    criterion, wrapper, bare = Criterion(), DistributedDataParallel(), nn.Parameter(torch.ones(1))
    assert names_in_modules([bare, criterion.centers]) == [None, "centers of Criterion"]
    on_meta = nn.Parameter(torch.ones(1, device="meta"))
    wrapped, rest = split_by_wrapper([wrapper.module.bias, criterion.centers, bare, on_meta])
    assert [(module is wrapper, list(tensors)) for module, tensors in wrapped] == [(True, ["bias"])]
    assert [one is other for one, other in zip(rest, [criterion.centers, bare], strict=True)] == [True, True]
