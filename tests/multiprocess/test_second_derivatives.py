# SPDX-License-Identifier: Apache-2.0
"""Gradients of gradients of sharded and split models, which torch computes in part, are an error, on one rank too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from loss_steps import whole
from replicas import TOLERANCE, largest_difference
from torch import nn
from torch.autograd import functional as derivatives
from torch.nn import functional
from training_loops import dataset

import rankwise as rw
from rankwise import testing
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from replicas import Parameters

    from rankwise.world.facts import World


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def _penalty(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> None:
    """The critic's loss of a WGAN-GP."""
    between = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    # This forward gathers what the gradients of the slope need: nothing else would show that they are incomplete.
    (functional.mse_loss(model(x), y) + ((slope.norm(dim=1) - 1) ** 2).mean()).backward()


def _inner(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> None:
    """A penalty of an activation, which the backward leaves the model at."""
    kept: list[torch.Tensor] = []
    with model[1].register_forward_hook(lambda *given: kept.append(given[-1])):
        output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), kept, create_graph=True)
    (functional.mse_loss(output, y) + slope.square().mean()).backward()


def _kept(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> None:
    functional.mse_loss(model(x), y).backward(create_graph=True)


def _hessian(model: nn.Sequential, x: torch.Tensor, _: torch.Tensor) -> None:
    derivatives.hvp(lambda given: model(given).sum(), x, torch.ones_like(x))


STEPS: dict[str, Callable[[nn.Sequential, torch.Tensor, torch.Tensor], None]] = {
    "penalty": _penalty,
    "inner": _inner,
    "kept": _kept,
    "hessian": _hessian,
}


def _gradients(model: nn.Module) -> Parameters:
    return whole({name: one.grad for name, one in model.named_parameters() if one.grad is not None})


def _refused(_: World, how: str, step: str) -> tuple[str, Parameters]:
    if how == "tensor_parallel":
        rw.mesh(tp=-1)
    model = rw.shard(network()) if how == "shard" else rw.tensor_parallel(network())
    x, y = dataset().tensors
    with pytest.raises(ConfigurationError) as refused:
        STEPS[step](model, x, y)
    model.zero_grad()
    functional.mse_loss(model(x), y).backward()
    return str(refused.value), _gradients(model)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("how", ["shard", "tensor_parallel"])
def test_second_derivatives_are_an_error_and_the_model_trains_on(how: str, step: str, num_ranks: int) -> None:
    plain = network()
    x, y = dataset().tensors
    functional.mse_loss(plain(x), y).backward()
    expected = _gradients(plain)
    for result in testing.run_ranks(_refused, num_ranks, how, step):
        said, gradients = result.get()
        assert f"{how}() does not support gradients of gradients" in said
        assert "use rankwise.replicate(model)" in said
        assert largest_difference(gradients, expected) <= TOLERANCE
