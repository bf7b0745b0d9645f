# SPDX-License-Identifier: Apache-2.0
"""A rank that skips a step, or leaves its loop, is named in the next backward; what all ranks skip is not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from replicas import TOLERANCE, largest_difference
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import rankwise as rw
from rankwise.errors import CollectiveMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from on_ranks import RunRanks
    from replicas import Parameters

    from rankwise.world.facts import World

SIZE = 22
BAD = 9
"""The sample that makes a loss NaN: of batch 1, on rank 0 of 2 and of 3."""


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def _data(*, is_bad: bool = True) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SIZE, 3, generator=generator, dtype=torch.float64)
    if is_bad:
        x[BAD] = math.nan
    return TensorDataset(x, torch.randn(SIZE, 1, generator=generator, dtype=torch.float64))


def _skip_where_it_is_nan(world: World, how: str) -> Parameters:
    model = rw.replicate(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = rw.DataLoader(_data(), global_batch_size=8)
    for _ in range(2):
        for x, y in loader:
            loss = functional.mse_loss(model(x), y)
            if math.isnan(rw.mean(loss, len(x)) if how == "alike" else loss.item()):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_that_skips_a_step_is_named_in_that_step(run_ranks: RunRanks, num_ranks: int) -> None:
    others = "rank 1" if num_ranks == 2 else "ranks 1-2"
    for result in run_ranks(_skip_where_it_is_nan, num_ranks, "alone"):
        assert isinstance(result.error, CollectiveMismatch)
        words = str(result.error)
        assert "rank 0 did not run backward for batch 1 of epoch 0, which other ranks now run" in words
        assert f"rank 0: batch 2 of epoch 0\n            {others}: batch 1 of epoch 0" in words
        assert "rankwise.mean(loss, len(x))" in words


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_step_that_all_ranks_skip_is_none(run_ranks: RunRanks, num_ranks: int) -> None:
    (alone,) = run_ranks(_skip_where_it_is_nan, 1, "alike")
    for result in run_ranks(_skip_where_it_is_nan, num_ranks, "alike"):
        assert largest_difference(result.get(), alone.get()) <= TOLERANCE


def _leave_the_loop_early(world: World, odd: int) -> None:
    model = rw.replicate(_model())
    loader = rw.DataLoader(_data(is_bad=False), global_batch_size=4)
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            if number == 3 and world.rank == odd:
                break
            functional.mse_loss(model(x), y).backward()


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_leaves_its_loop_early_is_named(run_ranks: RunRanks, odd: int) -> None:
    for result in run_ranks(_leave_the_loop_early, 2, odd):
        assert isinstance(result.error, CollectiveMismatch)
        assert f"rank {odd} did not run backward for batch 3 of epoch 0" in str(result.error)
        assert f"rank {odd}: batch 0 of epoch 1" in str(result.error)


def _look(model: nn.Module, loader: rw.DataLoader) -> None:
    for x, _ in loader:
        model(x)


def _two_at_once(model: nn.Module, loader: rw.DataLoader) -> Iterator[torch.Tensor]:
    for (x, y), (other, _) in zip(loader, rw.DataLoader(_data(is_bad=False), global_batch_size=5), strict=False):
        yield functional.mse_loss(model(x), y) + model(other).pow(2).mean()


def _one_ahead(model: nn.Module, loader: rw.DataLoader) -> Iterator[torch.Tensor]:
    batches = iter(loader)
    x, y = next(batches)
    for following in batches:
        yield functional.mse_loss(model(x), y)
        x, y = following
    yield functional.mse_loss(model(x), y)


def _own_forwards(world: World, model: nn.Module, loader: rw.DataLoader) -> Iterator[torch.Tensor]:
    validation = rw.DataLoader(_data(is_bad=False), global_batch_size=3)
    for x, y in loader:
        if world.rank == 0:
            model(x[:1])
            _look(model, validation)
        yield functional.mse_loss(model(x), y)


def _own_evaluation_last(world: World, model: nn.Module, loader: rw.DataLoader) -> Iterator[torch.Tensor]:
    validation = rw.DataLoader(_data(is_bad=False), global_batch_size=3)
    for x, y in loader:
        loss = functional.mse_loss(model(x), y)
        if world.rank == 0:
            next(iter(validation))
        yield loss


def _by_hand_after_a_look(world: World, model: nn.Module, loader: rw.DataLoader) -> Iterator[torch.Tensor]:
    if world.rank == 0:
        next(iter(loader))
    x, y = _data(is_bad=False).tensors
    for _ in range(3):
        yield functional.mse_loss(model(x[world.rank :: world.world_size]), y[world.rank :: world.world_size])


def _by_hand_after_unlike_looks(world: World, model: nn.Module, loader: rw.DataLoader) -> Iterator[torch.Tensor]:
    for number, _ in enumerate(loader):
        if number == world.rank:
            break
    yield from _by_hand_after_a_look(world, model, loader)


_LOOPS: dict[str, Callable[[World, nn.Module, rw.DataLoader], Iterator[torch.Tensor]]] = {
    "two loaders at once": lambda _, model, loader: _two_at_once(model, loader),
    "one batch ahead": lambda _, model, loader: _one_ahead(model, loader),
    "forwards of one rank": _own_forwards,
    "a loader of one rank between forward and backward": _own_evaluation_last,
    "by hand, after one rank's look at a batch": _by_hand_after_a_look,
    "by hand, after ranks looked at unlike numbers of batches": _by_hand_after_unlike_looks,
}


def _train(world: World, how: str) -> int:
    model = rw.replicate(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = rw.DataLoader(_data(is_bad=False), global_batch_size=8)
    num_steps = 0
    for loss in _LOOPS[how](world, model, loader):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        num_steps += 1
    return num_steps


@pytest.mark.parametrize("how", _LOOPS)
def test_loops_of_the_same_steps_are_not_reported(run_ranks: RunRanks, how: str) -> None:
    for result in run_ranks(_train, 2, how):
        assert result.get() == 3
