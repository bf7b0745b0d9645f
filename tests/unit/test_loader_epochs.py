# SPDX-License-Identifier: Apache-2.0
"""Epochs of the loader: their order, and resuming after any batch."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from small_datasets import Counting, flat, joined

from rankwise.data.loader import DataLoader

pytestmark = pytest.mark.usefixtures("alone")


def test_epochs_differ_and_repeat_with_the_seed() -> None:
    def epochs(seed: int) -> list[list[list[int]]]:
        loader = DataLoader(torch.arange(20), global_batch_size=5, shuffle=True, seed=seed)
        assert len(loader) == 4
        found = []
        for epoch in range(3):
            assert loader.epoch == epoch
            found.append(flat(loader))
        return found

    first = epochs(0)
    assert all(sorted(joined(epoch)) == list(range(20)) for epoch in first)
    assert len({json.dumps(epoch) for epoch in first}) == 3
    assert epochs(0) == first
    assert epochs(1) != first


@pytest.mark.parametrize(
    "data", [torch.arange(20), list(range(20)), Counting(20)], ids=["columns", "samples", "stream"]
)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("remainder", ["keep", "drop"])
def test_resume_after_every_batch(data: Any, num_workers: int, remainder: str) -> None:
    options = {"global_batch_size": 6, "num_workers": num_workers, "remainder": remainder}
    whole = DataLoader(data, **options)
    first, second = flat(whole), flat(whole)
    running = DataLoader(data, **options)
    for taken, batch in enumerate(running, 1):
        assert batch.tolist() == first[taken - 1]
        state = json.loads(json.dumps(running.state_dict()))
        resumed = DataLoader(data, **options)
        resumed.load_state_dict(state)
        assert (resumed.epoch, state["position"]) == (0, min(6 * taken, 20))
        assert flat(resumed) == first[taken:]
        assert resumed.epoch == 1
        assert flat(resumed) == second
    assert (running.epoch, running.state_dict()["position"]) == (1, 0)


def test_resume_where_no_epoch_is_under_way() -> None:
    running = DataLoader(torch.arange(20), global_batch_size=6, shuffle=True)
    states, epochs = [], []
    for _ in range(2):
        states.append(json.loads(json.dumps(running.state_dict())))
        epochs.append(flat(running))
    for state, epoch in zip(states, epochs, strict=True):
        resumed = DataLoader(torch.arange(20), global_batch_size=6, shuffle=True)
        resumed.load_state_dict(state)
        assert flat(resumed) == epoch


def test_resume_with_another_batch_size() -> None:
    before = DataLoader(torch.arange(20), global_batch_size=6, shuffle=True)
    order = joined(flat(DataLoader(torch.arange(20), global_batch_size=20, shuffle=True)))
    next(running := iter(before))
    next(running)
    after = DataLoader(torch.arange(20), global_batch_size=5, shuffle=True)
    after.load_state_dict(before.state_dict())
    assert flat(after) == [order[12:17], order[17:]]


def test_resume_where_less_than_a_whole_batch_is_left_to_drop() -> None:
    state = DataLoader(torch.arange(20), global_batch_size=6).state_dict() | {"position": 18}
    loader = DataLoader(torch.arange(20), global_batch_size=6, remainder="drop")
    loader.load_state_dict(state)
    assert (loader.epoch, len(list(loader))) == (0, 0)
    assert (loader.epoch, len(list(loader))) == (1, 3)


def test_leaving_early_ends_the_epoch_and_a_look_does_not() -> None:
    data = torch.arange(20)
    whole = DataLoader(data, global_batch_size=5, shuffle=True)
    epochs = [flat(whole) for _ in range(3)]
    loader = DataLoader(data, global_batch_size=5, shuffle=True)
    assert next(iter(loader)).tolist() == epochs[0][0]
    assert flat(loader) == epochs[0]
    for number, _ in enumerate(loader):
        if number == 2:
            break
    assert loader.epoch == 1
    assert loader.state_dict()["position"] == 15
    resumed = DataLoader(data, global_batch_size=5, shuffle=True)
    resumed.load_state_dict(loader.state_dict())
    assert flat(resumed) == epochs[1][3:]
    assert flat(loader) == epochs[2]
