# SPDX-License-Identifier: Apache-2.0
"""The first loss that is not finite: the rank that computed it names itself, the step and its samples, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from said import listening

import rankwise as rw
from rankwise import testing

if TYPE_CHECKING:
    from rankwise.world.facts import World

BATCH = 8
AT = 13


def _trained(_: World, value: float) -> list[str]:
    model = rw.replicate(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.ones(19, 2)
    data[AT, 0] = value
    with listening() as said:
        for _epoch in range(2):
            for x in rw.DataLoader(data, global_batch_size=BATCH):  # a rank has none of the last three samples
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    return [one for one in said if "the first one of any rank that is not finite" in one]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.0])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_rank_and_its_samples_are_named_once(value: float, world_size: int) -> None:
    said = [one.get() for one in testing.run_ranks(_trained, world_size, value)]
    share = BATCH // world_size
    culprit = (AT - BATCH) // share
    for rank, texts in enumerate(said):
        assert len(texts) == (rank == culprit and value != 1.0)
    for text in said[culprit]:
        first = culprit * share
        assert f"[rank {culprit}/{world_size}" in text
        assert f"is {value} in its samples {first} to {first + share - 1} of batch 1 of epoch 0" in text
        assert f"dataset[{', '.join(str(BATCH + first + number) for number in range(share))}]" in text


def _by_hand(world: World) -> list[str]:
    model = rw.replicate(torch.nn.Linear(2, 1))
    with listening() as said:
        for step in range(3):
            x = torch.full((4, 2), float("nan") if (step, world.rank) == (1, 1) else 1.0 + world.rank)
            model(x).square().mean().backward()
    return [one for one in said if "the first one of any rank that is not finite" in one]


def test_batches_of_no_loader_are_named_by_the_call() -> None:
    none, (text,) = (one.get() for one in testing.run_ranks(_by_hand, 2))
    assert none == []
    assert "is nan in backward() call 2," in text


def _masked(world: World) -> list[str]:
    model = rw.replicate(torch.nn.Linear(2, 1))
    with listening() as said:
        losses = model(torch.ones(4, 2)).square()
        losses[torch.arange(4) >= 4 * world.rank].mean().backward()
    return [one for one in said if "the first one of any rank that is not finite" in one]


def test_a_mean_over_an_empty_mask_is_not_named() -> None:
    assert [one.get() for one in testing.run_ranks(_masked, 2)] == [[], []]
