# SPDX-License-Identifier: Apache-2.0
"""The mean of losses over the samples of all ranks."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise import testing
from rankwise.errors import CollectiveMismatch, ConfigurationError

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World

pytestmark = pytest.mark.every_exchange

SAMPLES = torch.arange(7, dtype=torch.float64)


def _losses(_: World) -> tuple[float, float, float]:
    """Go over 7 samples in batches of 3: with 2 ranks or more, some have an empty share of the last one."""
    of_batch, losses, sizes = 0.0, [], []
    for x in rw.DataLoader(SAMPLES, global_batch_size=3):
        loss = x.mean()
        losses.append(loss.detach())
        sizes.append(len(x))
        of_batch = rw.mean(loss, len(x))
    running = sum(float(loss) * size for loss, size in zip(losses, sizes, strict=True))
    return of_batch, rw.mean(losses, sizes), running


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_mean_is_that_of_all_samples(run_ranks: RunRanks, world_size: int) -> None:
    results = [result.get() for result in run_ranks(_losses, world_size)]
    assert [result[:2] for result in results] == [(6.0, 3.0)] * world_size
    assert any(math.isnan(running) for _, _, running in results) == (world_size > 1), "there is an empty share"


def _odd_values(world: World) -> list[float]:
    nan = math.nan
    return [
        rw.mean(nan, 0),
        rw.mean([], []),
        rw.mean(nan if world.rank else 1.0, 1),
        rw.mean(torch.ones(1, requires_grad=True), torch.tensor(2)),
        rw.mean([1.0] * world.rank, [1] * world.rank),  # as many values as each rank has
        rw.mean(float(world.rank), world.rank + 0.5),
    ]


def test_values_without_weight_are_ignored_and_others_count() -> None:
    for result in testing.run_ranks(_odd_values, 2):
        *first, fourth, fifth, last = result.get()
        assert all(map(math.isnan, first))
        assert (fourth, fifth, last) == (1.0, 1.0, 0.75)


def test_the_mean_of_a_group() -> None:
    assert [result.get() for result in testing.run_ranks(_of_a_group, 3)] == [1.0, None, 1.0]


def _of_a_group(world: World) -> float | None:
    group = rw.new_group([0, 2])
    return None if group.rank is None else rw.mean(world.rank, 1, group=group)


def _on_rank_zero_only(world: World) -> None:
    if world.rank == 0:
        rw.mean(1.0, 1)
    rw.all_reduce(1.0)


def test_a_mean_that_only_one_rank_calls_is_named() -> None:
    for result in testing.run_ranks(_on_rank_zero_only, 2):
        assert isinstance(result.error, CollectiveMismatch)
        assert "rank 0: mean at" in str(result.error)


@pytest.mark.parametrize(
    ("values", "weights", "words"),
    [
        ([1.0, 2.0], [1], "2 values and 1 weights"),
        (1.0, -1, "at least zero and finite, got -1"),
        (1.0, math.inf, "at least zero and finite, got inf"),
        (torch.ones(2), 2, "values holds something else"),
        (1.0, "many", "weights holds something else"),
        (1.0, None, "weights holds something else"),
    ],
)
def test_mean_refuses_invalid_arguments(values: Any, weights: Any, words: str) -> None:
    with rw.join(), pytest.raises(ConfigurationError, match=words):
        rw.mean(values, weights)


def _of_a_loss_with_its_graph(_: World) -> float:
    loss = nn.Linear(2, 1)(torch.ones(1, 2)).mean()
    with warnings.catch_warnings(action="error"):
        return rw.mean(loss, 1) - loss.item()


def test_a_loss_that_still_has_its_graph_is_no_cause_for_a_warning() -> None:
    (result,) = testing.run_ranks(_of_a_loss_with_its_graph, 1)
    assert result.get() == 0.0


def _train(world: World) -> list[float]:
    """The loop of the README, over a global batch that leaves a rank without samples."""
    torch.manual_seed(0)
    model = rw.replicate(nn.Linear(1, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = rw.DataLoader(SAMPLES[:, None], global_batch_size=3)
    means = []
    for _ in range(2):
        losses, sizes = [], []
        for x in loader:
            loss = nn.functional.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            sizes.append(len(x))
        means.append(rw.mean(losses, sizes))
    return means


def test_any_number_of_ranks_prints_the_loss_of_one() -> None:
    (alone,) = testing.run_ranks(_train, 1)
    for result in testing.run_ranks(_train, 3):
        assert result.get() == pytest.approx(alone.get(), rel=1e-10)
