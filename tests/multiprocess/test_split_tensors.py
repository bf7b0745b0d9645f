# SPDX-License-Identifier: Apache-2.0
"""What a script reads of split parameters and gradients, and draws for them, is what one device reads and draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from loss_steps import whole
from replicas import TOLERANCE, largest_difference
from torch import nn

import rankwise as rw
from rankwise import testing
from rankwise.errors import CollectiveMismatch, ConfigurationError

if TYPE_CHECKING:
    from replicas import Parameters

    from rankwise.world.facts import World

SPLIT = {"shard": (2, {"dp_shard": 2}), "tensor_parallel": (2, {"tp": 2}), "both": (4, {"dp_shard": 2, "tp": 2})}


def _model(how: str) -> nn.Module:
    """Return a model, split; its widths do not divide evenly along ``dp_shard``."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    if how != "plain":
        rw.mesh(**SPLIT[how][1])
    if how in {"tensor_parallel", "both"}:
        rw.tensor_parallel(model)
    if how in {"shard", "both"}:
        rw.shard(model)
    x = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) / 10
    model(x).square().mean().backward()
    return model


def _numbers(_: World | None, how: str) -> list[float]:
    found: list[float] = []
    for parameter in _model(how).parameters():
        assert parameter.grad is not None
        gradient = parameter.grad
        found += [gradient.norm().item(), float(gradient.sum()), float(parameter.detach().mean())]
        found.append(float(gradient.abs().max()))
        found.append(bool((gradient.abs() == found[-1]).any()))  # true on the rank that holds the largest
    return found


def _drawn(_: World | None, how: str) -> Parameters:
    model = _model(how)
    torch.manual_seed(5)
    with torch.no_grad():
        for module in (model.get_submodule("0"), model.get_submodule("2")):
            nn.init.kaiming_uniform_(module.get_parameter("weight"))
            nn.init.normal_(module.get_parameter("bias"), std=0.3)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
            parameter.mul_(torch.empty_like(parameter).bernoulli_(0.5))
    return whole(dict(model.named_parameters()))


@pytest.mark.parametrize("how", SPLIT)
def test_numbers_read_of_split_tensors_are_those_of_one_device(how: str) -> None:
    for found in [result.get() for result in testing.run_ranks(_numbers, SPLIT[how][0], how)]:
        assert found == pytest.approx(_numbers(None, "plain"), rel=TOLERANCE)


@pytest.mark.parametrize("how", SPLIT)
def test_random_numbers_for_split_parameters_are_those_of_one_device(how: str) -> None:
    for found in [result.get() for result in testing.run_ranks(_drawn, SPLIT[how][0], how)]:
        assert largest_difference(found, _drawn(None, "plain")) <= TOLERANCE


def _assigned(_: World, how: str) -> Parameters:
    model = _model(how)
    for parameter in model.parameters():
        before = whole({"": parameter})
        parameter.data -= 0.5 * parameter.data  # the same memory, which works
        assert largest_difference({"": 2 * whole({"": parameter})[""]}, before) <= TOLERANCE
    for parameter in model.parameters():
        parameter.data = 2 * parameter.data
    return {}


@pytest.mark.parametrize("how", SPLIT)
def test_assigning_to_the_data_of_split_parameters_is_an_error(how: str) -> None:
    for result in testing.run_ranks(_assigned, SPLIT[how][0], how):
        assert isinstance(result.error, ConfigurationError)
        assert "would have no effect" in str(result.error)


def _read_on_one(world: World) -> None:
    model = _model("shard")
    if world.rank == 0:
        model.get_parameter("0.weight").norm().item()
    model(torch.zeros(1, 3, dtype=torch.float64))


def test_a_number_that_one_rank_reads_is_an_error_on_all() -> None:
    results = testing.run_ranks(_read_on_one, 2)
    assert [type(result.error) for result in results] == [CollectiveMismatch] * 2
    assert "reading a number of split tensors" in str(results[0].error)
