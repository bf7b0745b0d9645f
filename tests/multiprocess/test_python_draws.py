# SPDX-License-Identifier: Apache-2.0
"""Python's and NumPy's global generators inside ``as_one_rank()``: rows as one rank draws them, or named."""

from __future__ import annotations

import random
from threading import Thread
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from said import check_said, listening

import rankwise as rw
from rankwise import testing
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World

    Draw = Callable[[torch.Tensor], object]
    """Draws for a batch."""

FOUR = "drew 4 random numbers one at a time, as many as this rank has samples"


def _in_several_places(_: torch.Tensor) -> list[float]:
    drawn = [random.random(), random.random()]
    return [*drawn, np.random.rand(), np.random.rand()]  # noqa: NPY002 - public scripts use it


def _imported(x: torch.Tensor) -> list[float]:
    return [_one_of_a_library() for _ in x]


def _one_of_a_library() -> float:
    return random.gauss(0.0, 1.0)


def _elsewhere(x: torch.Tensor) -> None:
    done: list[int] = []
    thread = Thread(target=lambda: done.append(_augmented(len(x))))
    thread.start()
    thread.join()
    assert done == [len(x)]


def _augmented(num: int) -> int:
    """Draw as a loader that reads ahead may, for samples of another batch."""
    random.shuffle(list(range(num)))
    return len([random.random() for _ in np.random.permutation(num)])  # noqa: NPY002


ONE_BY_ONE: dict[str, Draw] = {
    "random": lambda x: [random.random() for _ in x],
    "randint": lambda x: [random.randint(0, 9) for _ in x],
    "choice": lambda x: [random.choice("abc") for _ in x],
    "in a function": _imported,
    "numpy rand": lambda x: [np.random.rand() for _ in x],  # noqa: NPY002
    "numpy randint": lambda x: [np.random.randint(9) for _ in x],  # noqa: NPY002
    "numpy normal": lambda x: [np.random.normal(0.0, 1.0, 1) for _ in x],  # noqa: NPY002
}
NOT_NAMED: dict[str, Draw] = {
    "once per batch": lambda _: random.random(),
    "as many draws as samples, in several places": _in_several_places,
    "in one call": lambda x: (random.choices(range(10), k=len(x)), np.random.rand(len(x))),  # noqa: NPY002
    "fewer than samples": lambda x: [random.random() for _ in x[1:]],
    "values of another number": lambda x: (random.shuffle([0] * (len(x) + 1)), random.sample(range(99), len(x))),
    "in another thread": _elsewhere,
}


def _drawn(_: World, kind: str) -> list[str]:
    draw = (ONE_BY_ONE | NOT_NAMED)[kind]
    random.seed(0)
    with listening() as said:
        for x in rw.DataLoader(torch.ones(12 if kind in ONE_BY_ONE else 8, 2), global_batch_size=8):
            with rw.as_one_rank():
                draw(x)
    return said


@pytest.mark.parametrize("kind", ONE_BY_ONE)
def test_numbers_of_each_sample_are_named_once_with_their_line(kind: str) -> None:
    first, other = (one.get() for one in testing.run_ranks(_drawn, 2, kind))
    check_said(first, [FOUR])
    assert first[0].startswith("test_python_draws.py:")
    assert "in one call of torch or numpy.random" in first[0]
    assert other == []


@pytest.mark.parametrize("kind", NOT_NAMED)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_no_report_for(kind: str, num_ranks: int) -> None:
    assert [one.get() for one in testing.run_ranks(_drawn, num_ranks, kind)] == [[]] * num_ranks


def _choices(_: World) -> list[tuple[list[int], list[str], float]]:
    random.seed(0)
    drawn: list[tuple[list[int], list[str], float]] = []
    for x in rw.DataLoader(torch.ones(7, 1), global_batch_size=5):
        with rw.as_one_rank():
            labels = random.choices(range(10), k=len(x))
            words = random.choices(["a", "b"], [0.2, 0.8], k=len(x))
        drawn.append((labels, words, random.random()))
    return drawn


def test_choices_are_the_rows_of_one_rank() -> None:
    random.seed(0)
    plain = [
        (random.choices(range(10), k=num), random.choices(["a", "b"], [0.2, 0.8], k=num), random.random())
        for num in (5, 2)
    ]
    parts = [one.get() for one in testing.run_ranks(_choices, 3)]
    for number, (labels, words, last) in enumerate(plain):
        assert [label for part in parts for label in part[number][0]] == labels
        assert [word for part in parts for word in part[number][1]] == words
        assert [part[number][2] for part in parts] == [last] * 3


def _mixed(_: World, kind: str) -> None:
    for x in rw.DataLoader(torch.ones(16, 2), global_batch_size=8):
        with rw.as_one_rank():
            random.shuffle(list(x)) if kind == "shuffle" else random.sample(range(len(x)), len(x))


@pytest.mark.parametrize("kind", ["shuffle", "sample"])
def test_a_permutation_of_a_part_of_the_batch_is_an_error(kind: str) -> None:
    testing.run_ranks(_mixed, 1, kind)[0].get()
    before = random.shuffle, np.random.rand
    for result in testing.run_ranks(_mixed, 2, kind):
        with pytest.raises(ConfigurationError, match=rf"random.{kind} at .* permutes this rank's samples"):
            result.get()
    assert (random.shuffle, np.random.rand) == before
