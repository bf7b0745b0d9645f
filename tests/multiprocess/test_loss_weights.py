# SPDX-License-Identifier: Apache-2.0
"""`replicate`: whatever a loss is a mean or a sum over, N ranks compute what the plain script computes on one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from losses import CLASS_WEIGHTS, COUPLED, EXACT, labels
from replicas import TOLERANCE, Parameters, largest_difference, part
from torch import nn
from torch.nn import functional as F

import rankwise as rw
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from losses import Loss
    from on_ranks import RunRanks

    from rankwise.world import World

SIZES = (9, 4, 2, 7)
"""Of the global batches: the third leaves ranks without samples."""


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def _data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 3, generator=generator, dtype=torch.float64),
            torch.randn(size, 4, generator=generator, dtype=torch.float64),
        )
        for size in SIZES
    ]


def _train(
    model: nn.Module, step: Callable[[nn.Module, torch.Tensor, torch.Tensor], None], rank: int, of: int
) -> Parameters:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for x, y in _data():
        optimizer.zero_grad()
        step(model, part(x, rank, of), part(y, rank, of))
        optimizer.step()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def _step(loss: Loss) -> Callable[[nn.Module, torch.Tensor, torch.Tensor], None]:
    return lambda model, x, y: loss(model(x), y, x).backward()


def _step_twice(loss: Loss) -> Callable[[nn.Module, torch.Tensor, torch.Tensor], None]:
    def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        loss(model(x), y, x).backward()
        (loss(model(x), y, x) / 7).backward()

    return step


def _on_ranks(world: World, twice: bool) -> dict[str, Parameters]:
    make = _step_twice if twice else _step
    return {
        name: _train(rw.replicate(_model()), make(loss), world.rank, world.world_size) for name, loss in EXACT.items()
    }


@pytest.mark.parametrize("twice", [False, True], ids=["one_backward", "two_backwards"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_losses_are_exact(run_ranks: RunRanks, world_size: int, twice: bool) -> None:
    make = _step_twice if twice else _step
    plain = {name: _train(_model(), make(loss), 0, 1) for name, loss in EXACT.items()}
    for result in run_ranks(_on_ranks, world_size, twice):
        parts = {name: largest_difference(got, plain[name]) for name, got in result.get().items()}
        assert {name: apart for name, apart in parts.items() if apart > TOLERANCE} == {}
