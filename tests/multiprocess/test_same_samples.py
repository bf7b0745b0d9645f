# SPDX-License-Identifier: Apache-2.0
"""A loader that gives every rank the same samples is reported in the first step; nothing else is."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise import testing
from rankwise.log import logger

if TYPE_CHECKING:
    from rankwise.world.facts import World

BY_HAND = "first step: Linear was called with 8 samples on 2 ranks together, not from a loader of rankwise"
WORDS = "every rank called Linear with the same inputs in the first step"


def _data(how: str) -> list[torch.Tensor]:
    samples = [torch.full((2,), float(number)) for number in range(8)]
    if how == "torch's loader":
        return list(torch.utils.data.DataLoader(samples, batch_size=4))
    if how == "a sampler":
        sampler = rw.ShardedSampler(len(samples), global_batch_size=4)
        return list(torch.utils.data.DataLoader(samples, batch_sampler=sampler))
    if how == "no samples":
        # All but the first stand in for a part that is empty.
        return [torch.ones(1, 2)] * 2
    return list(rw.DataLoader(samples, global_batch_size=4))


def _train(world: World, how: str) -> list[str]:
    said: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    model = rw.replicate(nn.Linear(2, 1), weight=lambda x: 0 if how == "no samples" and world.rank else len(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x in _data(how):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [text for text in said if "every rank called" in text or text.startswith("first step")]


@pytest.mark.parametrize("how", ["torch's loader", "a sampler", "our loader", "no samples"])
def test_the_same_samples_on_every_rank_are_reported_once(how: str) -> None:
    first, *others = [result.get() for result in testing.run_ranks(_train, 3, how)]
    assert others == [[], []]
    assert [text[: len(WORDS)] for text in first] == [WORDS] * (how == "torch's loader")


def _train_by_hand(world: World, how: str) -> list[str]:
    said: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    torch.manual_seed(0)
    x = torch.arange(16.0).view(8, 2)
    if how == "the graph":
        parts = [x]
    elif how == "slices":
        parts = [x[start : start + 4] for start in (0, 4)]
    elif how == "own draws":
        order = torch.randperm(8, generator=torch.Generator().manual_seed(world.rank))
        parts = [x[order[start : start + 4]] for start in (0, 4)]
    else:
        parts = [x[world.rank :: world.world_size]]
    model = rw.replicate(nn.Linear(2, 1))
    for one in parts:
        model(one).square().sum().backward()
    return [text for text in said if "in the first step" in text or text.startswith("first step")]


@pytest.mark.parametrize("how", ["the graph", "slices", "own draws", "shares"])
def test_batches_made_by_hand_are_reported_once(how: str) -> None:
    first, second = [result.get() for result in testing.run_ranks(_train_by_hand, 2, how)]
    assert second == []
    (said,) = first
    if how in ("own draws", "shares"):
        assert said.startswith(BY_HAND)
    else:
        assert said.startswith(WORDS)
        assert "the gradients of its summed loss are 2 times those of one rank" in said
