# SPDX-License-Identifier: Apache-2.0
"""Ranks that are slower than the others for many steps are named, each once, whoever was named before."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from rankwise.insight.slow_rank import FIRST_WINDOW, SlowRank
from rankwise.insight.step_record import Step
from rankwise.meter import DATA, EXCHANGE, FORWARD, PARTS
from rankwise.store.client import Store


def step_of(number: int, data: float) -> Step:
    """Return a step of a rank that computes for 10 ms and waits for its data and for the others."""
    parts = [0.0] * len(PARTS)
    parts[DATA], parts[FORWARD], parts[EXCHANGE] = data, 0.01, 0.5
    return Step(number, 0.0, tuple(parts), 0.0, 0.0, 0.0, 0.0, 8, 0, 0, 0)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    heard: list[str] = []
    monkeypatch.setattr("rankwise.insight.slow_rank.warn", lambda text, **_: heard.append(text))
    return heard


def named(ranks: list[SlowRank], said: list[str], numbers: range, slow: int | None) -> list[int]:
    """Have all ranks take steps, of which one waits for its data; return which ones are named."""
    found = []
    for number in numbers:
        for rank, one in enumerate(ranks):
            one.note(step_of(number, 0.01 if rank == slow else 0.001))
            if said:
                found.append(rank)
                assert "it waits for its data" in said.pop()
    return found


def test_each_slow_rank_is_named_once_and_others_after_it(said: list[str]) -> None:
    store = Store(dist.HashStore())
    ranks = [SlowRank(store, 3) for _ in range(3)]
    first = range(1, 10 * FIRST_WINDOW)
    assert named(ranks, said, first, slow=1) == [1]
    assert named(ranks, said, range(first.stop, first.stop + 20 * FIRST_WINDOW), slow=0) == [0]


def test_equal_ranks_are_not_named(said: list[str]) -> None:
    store = Store(dist.HashStore())
    assert named([SlowRank(store, 3) for _ in range(3)], said, range(1, 10 * FIRST_WINDOW), slow=None) == []
