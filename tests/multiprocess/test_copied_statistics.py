# SPDX-License-Identifier: Apache-2.0
"""Copies of a replicated model that are called in training mode: exact if they are replicated too, named otherwise."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from replicas import TOLERANCE, largest_difference
from said import check_said, listening
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, update_bn
from training_loops import BATCH_SIZE, dataset, network, parameters_of, plain_batches

import rankwise as rw
from rankwise import testing

if TYPE_CHECKING:
    from collections.abc import Callable

    from replicas import Parameters
    from training_loops import Batches

    from rankwise.world.facts import World

    Spread = Callable[[nn.Module], nn.Module]

NAMED = "AveragedModel is not replicated, and its BatchNorm1d has running statistics that differ between ranks"


def _train(how: str, spread: Spread, spread_copy: Spread, batches: Batches) -> Parameters:
    model = spread(network(nn.BatchNorm1d(5)))
    if how == "after training":
        _epochs(model, batches, 2)
        average = spread_copy(AveragedModel(model))
    else:
        average = spread_copy(AveragedModel(model))
    if how == "evaluated":
        average.eval()
    _epochs(model, batches, 2, average)
    if how in {"update_bn", "after training"}:
        update_bn(batches, average)
    return parameters_of(average)


def _epochs(model: nn.Module, batches: Batches, num: int, average: nn.Module | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num):
        for x, y in batches:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            if average is not None and not average.training:
                with torch.no_grad():
                    average(x)
            loss.backward()
            optimizer.step()
        if isinstance(average, AveragedModel):
            average.update_parameters(model)


def _synchronised(model: nn.Module) -> nn.Module:
    return rw.replicate(model, sync_batchnorm=True)


def _on_ranks(_: World, how: str, is_spread: bool) -> tuple[Parameters, list[str]]:
    loader = rw.DataLoader(dataset(), global_batch_size=BATCH_SIZE)
    with listening() as said:
        found = _train(how, _synchronised, _synchronised if is_spread else lambda one: one, loader)
        rw.barrier()
    return found, [text for text in said if "running statistics" in text]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("how", ["update_bn", "after training"])
def test_statistics_of_a_replicated_copy_are_exact(num_ranks: int, how: str) -> None:
    plain = _train(how, lambda one: one, lambda one: one, plain_batches())
    for result in testing.run_ranks(_on_ranks, num_ranks, how, True):
        found, said = result.get()
        assert largest_difference(found, plain) <= TOLERANCE
        assert said == []


@pytest.mark.parametrize("how", ["update_bn", "after training"])
def test_statistics_of_a_copy_that_differ_are_named_once(how: str) -> None:
    results = testing.run_ranks(_on_ranks, 2, how, False)  # on three, the last batch leaves one sample for a rank
    check_said([text for result in results for text in result.get()[1]], [NAMED])


def test_a_copy_that_is_only_evaluated_is_not_named() -> None:
    assert [result.get()[1] for result in testing.run_ranks(_on_ranks, 2, "evaluated", False)] == [[], []]


def _teach(_: World, how: str) -> list[str]:
    """A mean teacher, called in training mode beside its student."""
    with listening() as said:
        student = _synchronised(network(nn.BatchNorm1d(5)))
        teacher = copy.deepcopy(student)
        if how == "independent":
            rw.independent(teacher)
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        for x, y in rw.DataLoader(dataset(), global_batch_size=BATCH_SIZE):
            with torch.no_grad():
                goal = teacher(x)
            optimizer.zero_grad()
            (functional.mse_loss(student(x), y) + functional.mse_loss(student(x), goal)).backward()
            optimizer.step()
        rw.barrier()
    return [text for text in said if "running statistics" in text]


@pytest.mark.parametrize("how", ["teacher", "independent"])
def test_a_teacher_in_training_mode_is_named_after_one_epoch(how: str) -> None:
    said = [text for result in testing.run_ranks(_teach, 2, how) for text in result.get()]
    check_said(said, ["Sequential is not replicated, and its BatchNorm1d"] if how == "teacher" else [])
