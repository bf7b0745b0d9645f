# SPDX-License-Identifier: Apache-2.0
"""Whether calls are split is decided by the times of loops: here by a clock that the tests move."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from rankwise.auto import known
from rankwise.auto.known import AGAIN, NUM_TIMED, Pace

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the time, which only the test moves."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(known.time, "perf_counter", lambda: now.seconds)
    return now


def _loop(one: Pace, clock: SimpleNamespace, seconds: Callable[[bool], float], number: int) -> list[bool]:
    """Run calls; return which of them were split. ``seconds``: of a loop with a split call, or a whole one."""
    found = []
    for _ in range(number):
        found.append(one.next_is_split())
        clock.seconds += seconds(found[-1])
    return found


def _decided(clock: SimpleNamespace, split: float, whole: float) -> Pace:
    one = Pace()
    _loop(one, clock, lambda is_split: split if is_split else whole, 2 * NUM_TIMED + 1)
    return one


def test_both_ways_are_timed_equally_often_before_one_is_taken(clock: SimpleNamespace) -> None:
    one = Pace()
    found = _loop(one, clock, lambda _: 1.0, 2 * NUM_TIMED)
    assert one.ratio is None
    assert found.count(True) == found.count(False) == NUM_TIMED
    one.next_is_split()
    assert one.ratio == 1.0


@pytest.mark.parametrize(
    ("split", "whole", "is_split"),
    [(1.0, 2.0, True), (2.0, 1.0, False), (1.0, 1.0, False), (0.99, 1.0, False), (0.9, 1.0, True)],
)
def test_the_faster_way_is_taken_and_a_gain_of_nothing_is_none(
    clock: SimpleNamespace, split: float, whole: float, is_split: bool
) -> None:
    one = _decided(clock, split, whole)
    assert one.ratio == pytest.approx(split / whole)
    assert one.is_split is is_split
    assert set(_loop(one, clock, lambda _: 1.0, 50)) == {is_split}


def test_one_slow_loop_decides_nothing(clock: SimpleNamespace) -> None:
    one, times = Pace(), itertools.chain([500.0], itertools.repeat(1.0))
    _loop(one, clock, lambda is_split: next(times) if is_split else 2.0, 2 * NUM_TIMED + 1)
    assert one.ratio == pytest.approx(0.5)


@pytest.mark.parametrize("num_calls", [2, 3, 4, 6, 12])
def test_a_call_is_not_taken_for_fast_because_of_its_place_in_a_step(clock: SimpleNamespace, num_calls: int) -> None:
    one, seconds = Pace(), itertools.cycle([1.0] * (num_calls - 1) + [10.0])
    _loop(one, clock, lambda _: next(seconds), 2 * NUM_TIMED + 1)
    assert one.ratio == pytest.approx(1.0)


def test_the_ways_are_timed_again_and_the_other_one_may_be_faster_now(clock: SimpleNamespace) -> None:
    one = _decided(clock, 2.0, 1.0)
    num_later = 2 * NUM_TIMED * AGAIN
    found = _loop(one, clock, lambda is_split: 1.0 if is_split else 2.0, num_later + 2 * NUM_TIMED + 2)
    assert not any(found[: num_later - 1])
    assert found[-1]
    assert one.ratio == pytest.approx(0.5)


def test_an_interrupted_loop_is_not_timed(clock: SimpleNamespace) -> None:
    one = Pace()
    for number in range(8 * NUM_TIMED):
        is_split = one.next_is_split()
        is_odd = number % 4 == 1
        clock.seconds += 1000.0 if is_odd else 1.0 if is_split else 2.0
        if is_odd:
            one.interrupted()
    assert one.ratio == pytest.approx(0.5)
