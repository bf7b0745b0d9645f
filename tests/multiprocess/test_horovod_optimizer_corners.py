# SPDX-License-Identifier: Apache-2.0
"""`hvd.DistributedOptimizer` when ranks act differently: steps, metrics, closures, loading, deletion."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import rankwise.compat.horovod as hvd
from rankwise import testing
from rankwise.compat.horovod import queue

if TYPE_CHECKING:
    from rankwise.world.facts import World

Optimizer = torch.optim.Optimizer


def built(learning_rate: float = 0.1) -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    return model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=learning_rate))


def step(model: nn.Module, optimizer: Optimizer, value: float) -> None:
    """Step with gradients of ``value``."""
    model(torch.full((1, 3), value, dtype=torch.float64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def weight_of(model: nn.Module) -> float:
    """Return what all weights are."""
    (parameter,) = model.parameters()
    values = parameter.detach().unique().tolist()
    assert len(values) == 1
    return round(values[0], 12)


def _metrics_until_the_data_ends(world: World, order: list[int]) -> tuple[float, list[float]]:
    hvd.init()
    model, optimizer = built()
    metrics = []
    for _ in range(1 + 2 * order.index(world.rank)):
        step(model, optimizer, 3.0)
        metrics.append(float(hvd.allreduce(torch.tensor(6.0), name="loss")))
    last = hvd.join()
    assert last == order[-1]
    hvd.broadcast_parameters(model.state_dict(), last)
    return weight_of(model), metrics


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]], ids=str)
def test_metrics_without_dimensions_count_joined_ranks_as_zeros(order: list[int]) -> None:
    results = [one.get() for one in testing.run_ranks(_metrics_until_the_data_ends, 3, order)]
    first, last = results[order[0]], results[order[-1]]
    assert last == (first[0], [6.0, 4.0, 4.0, 2.0, 2.0])
    # A third of the gradients for each rank that has data: 3 in the first step, then 2, 2, 1, 1.
    assert first == (round(1.0 - 0.1 * 9.0, 12), [6.0])


def _closure_without_a_gradient(world: World) -> float:
    hvd.init()
    model, optimizer = built()

    def closure() -> float:
        optimizer.zero_grad()
        if world.rank == 0:
            return 0.0
        loss = model(torch.full((1, 3), 4.0, dtype=torch.float64)).sum()
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)
    return weight_of(model)


def test_a_rank_whose_closure_computes_nothing_counts_as_zeros() -> None:
    for result in testing.run_ranks(_closure_without_a_gradient, 2):
        assert result.get() == 1.0 - 0.1 * 2.0


def _loaded_on_one_rank(world: World) -> tuple[float, float]:
    hvd.init()
    model = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain)
    step(model, optimizer, 1.0)
    if world.rank == 0:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    # As a scheduler does that was made before the optimizer was wrapped.
    plain.param_groups[0]["lr"] = 0.2
    step(model, optimizer, 1.0)
    return weight_of(model), optimizer.param_groups[0]["lr"]


def test_one_rank_may_load_a_state_and_earlier_schedulers_continue() -> None:
    for result in testing.run_ranks(_loaded_on_one_rank, 2):
        assert result.get() == (0.7, 0.2)


def _trained_and_let_go() -> weakref.ref[nn.Module]:
    model, optimizer = built()
    step(model, optimizer, 1.0)
    return weakref.ref(model)


def _let_go(world: World) -> tuple[bool, int, float]:
    hvd.init()
    model_of = _trained_and_let_go()
    gc.collect()
    is_free = model_of() is None
    for _ in range(3):
        _trained_and_let_go()
        gc.collect()
    num_kept = len(queue.current_queue().as_joined)
    model, optimizer = built()
    step(model, optimizer, 1.0)
    left = model.weight.detach().clone()
    if world.rank == 0:
        del model, optimizer
        gc.collect()
    else:
        step(model, optimizer, 1.0)
        left = model.weight.detach()
    hvd.join()
    return is_free, num_kept, round(float(left[0, 0]), 12)


def test_an_optimizer_that_no_rank_has_is_freed_and_one_that_a_joined_rank_let_go_is_not() -> None:
    first, second = (one.get() for one in testing.run_ranks(_let_go, 2))
    # Two entries each: the latest one remains until the next opens.
    assert first == (True, 2, 0.9)
    assert second == (True, 2, 0.85)
