# SPDX-License-Identifier: Apache-2.0
"""Optimizers of the user's own on parameter servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import rankwise as rw
from rankwise import testing

if TYPE_CHECKING:
    from rankwise.world.facts import World


class WithLast(torch.optim.Optimizer):
    """Takes a step by this gradient and the last, which it keeps as it is."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.1 * (parameter.grad + self.state[parameter].get("last", 0.0)))
            self.state[parameter]["last"] = parameter.grad


def _train(_: World) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(3, 3).double()
    optimizer = WithLast(model.parameters())
    server = rw.parameter_server(model, optimizer)
    for (x,) in rw.DataLoader(TensorDataset(torch.randn(24, 3, dtype=torch.float64)), global_batch_size=4):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    server.synchronize()
    return model.weight.detach().clone()


@pytest.mark.parametrize("exchange", ["auto", "gloo"])
def test_an_optimizer_may_keep_gradients(exchange: str) -> None:
    alone = testing.run_ranks(_train, 1)[0].get()
    for result in testing.run_ranks(_train, 3, exchange=exchange):
        assert torch.allclose(result.get(), alone, rtol=1e-12, atol=1e-14)
