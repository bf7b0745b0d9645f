# SPDX-License-Identifier: Apache-2.0
"""`replicate` called again after the parameters of a model have changed: growing, pruning, replacing layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from replicas import TOLERANCE, Parameters, largest_difference
from torch import nn
from torch.nn import functional

import rankwise as rw
from rankwise import testing
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World

WIDTHS = {"small": 4, "one copy per host": 16000}


def _model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(width)
    first = nn.Linear(3, width)
    model = nn.Sequential(first, norm, nn.Dropout(0.5), nn.Tanh(), nn.Linear(width, 1)).double()
    first.weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    return model


def _epoch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(18, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for batch in rw.DataLoader(x, global_batch_size=8):
        optimizer.zero_grad()
        functional.mse_loss(model(batch), 2 * batch[:, :1]).backward()
        optimizer.step()


def _grow(model: nn.Sequential) -> None:
    model.append(nn.Linear(1, 2).double())
    model.append(nn.Linear(2, 1).double())


def _replace(model: nn.Sequential) -> None:
    model[4] = nn.Linear(len(_weight(model, 0)), 1).double()


def _weight(model: nn.Sequential, layer: int) -> nn.Parameter:
    return model.get_parameter(f"{layer}.weight")


def _narrow(model: nn.Sequential, last: int) -> None:
    """Keep two of the outputs of the first layer."""
    for parameter in (_weight(model, 0), model.get_parameter("0.bias")):
        parameter.data = parameter.data[:2].clone()
    _weight(model, last).data = _weight(model, last).data[:, :2].clone()
    model.zero_grad()


def _prune(model: nn.Sequential) -> None:
    _narrow(model, 4)
    model[1] = nn.BatchNorm1d(2).double()


def _assign(model: nn.Sequential) -> None:
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)


CHANGES = {"grow": _grow, "replace": _replace, "prune": _prune, "assign": _assign}


def _sgd(model: nn.Sequential) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.04 / len(_weight(model, 0)), momentum=0.9)


def _train(_: World, change: str, width: int) -> Parameters:
    model = rw.replicate(_model(width), sync_batchnorm=True)
    _epoch(model, _sgd(model))
    for seed in (5, 6):
        torch.manual_seed(seed)
        CHANGES[change](model)
        rw.replicate(model, sync_batchnorm=True)
        _epoch(model, _sgd(model))
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("size", WIDTHS)
def test_a_model_that_has_changed_is_replicated_again(run_ranks: RunRanks, change: str, size: str) -> None:
    (one,) = testing.run_ranks(_train, 1, change, WIDTHS[size])
    for num_ranks in (2, 3) if size == "small" else (2,):
        for result in run_ranks(_train, num_ranks, change, WIDTHS[size]):
            assert largest_difference(result.get(), one.get()) <= TOLERANCE


def _added_to_the_optimizer(_: World) -> Parameters:
    model = rw.replicate(_model(4), sync_batchnorm=True)
    optimizer = _sgd(model)
    _epoch(model, optimizer)
    torch.manual_seed(5)
    model.append(nn.Linear(1, 1).double())
    with pytest.raises(ConfigurationError, match=r"pass the new parameters to optimizer\.add_param_group"):
        model(torch.ones(2, 3, dtype=torch.float64))
    rw.replicate(model, sync_batchnorm=True)
    optimizer.add_param_group({"params": model[5].parameters()})
    _epoch(model, optimizer)
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def test_new_parameters_are_added_to_the_optimizer(run_ranks: RunRanks) -> None:
    (one,) = testing.run_ranks(_added_to_the_optimizer, 1)
    for result in run_ranks(_added_to_the_optimizer, 3):
        assert largest_difference(result.get(), one.get()) <= TOLERANCE


def _smaller(_: World) -> None:
    model = rw.replicate(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double())
    optimizer = _sgd(model)
    _epoch(model, optimizer)
    _narrow(model, 1)
    _epoch(model, optimizer)


def test_a_shape_that_changes_without_another_call_is_an_error() -> None:
    for result in testing.run_ranks(_smaller, 2):
        assert isinstance(result.error, ConfigurationError)
        assert "has changed its shape since the model was distributed" in str(result.error)
        assert "rankwise.replicate(model)" in str(result.error)
