# SPDX-License-Identifier: Apache-2.0
"""Losses of parameter servers and of worker groups, which average gradients, or changes, that ranks compute alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from loss_steps import data, plain_model, said, step_of, train, whole
from losses import EXACT, MEANS, SEVERAL, SUMS
from replicas import TOLERANCE, largest_difference
from torch.utils.data import TensorDataset

import rankwise as rw
from rankwise import testing

if TYPE_CHECKING:
    from losses import Loss
    from replicas import Parameters
    from torch import nn

    from rankwise.world.facts import World

BY_SERVERS = ("mse", "class_weights", "ignore_index", "masked", "masked_by_index", "sum", "cross_entropy_sum", "vae")
BY_WORKER_GROUPS = ("mse", "class_weights", "ignore_index", "masked", "masked_by_index", "two_means")


def _dataset() -> TensorDataset:
    x, y = (torch.cat(parts) for parts in zip(*data(), strict=True))
    return TensorDataset(x, y)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: rw.DataLoader, loss: Loss) -> Parameters:
    for x, y in loader:
        loss(model(x), y, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(dict(model.named_parameters()))


def _by_servers(world: World, names: tuple[str, ...]) -> tuple[dict[str, Parameters], list[str]]:
    del world
    with said() as lines:
        found = {}
        for name in names:
            model = plain_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
            server = rw.parameter_server(model, optimizer, servers=1)
            _train(model, optimizer, rw.DataLoader(_dataset(), global_batch_size=5), EXACT[name])
            server.synchronize()
            found[name] = whole(dict(model.named_parameters()))
    return found, lines


@pytest.mark.parametrize("name", BY_SERVERS)
def test_servers_take_means_by_their_weights_and_add_sums_up(name: str) -> None:
    assert name in {**MEANS, **SUMS}
    (alone,) = testing.run_ranks(_by_servers, 1, (name,))
    for result in testing.run_ranks(_by_servers, 3, (name,)):
        got, lines = result.get()
        assert largest_difference(got[name], alone.get()[0][name]) < TOLERANCE
        assert [line for line in lines if "loss" in line] == []


def test_several_terms_of_workers_are_warned_of() -> None:
    assert "two_means" in SEVERAL
    lines = [line for result in testing.run_ranks(_by_servers, 3, ("two_means",)) for line in result.get()[1]]
    assert len([line for line in lines if "has several terms" in line and "losses.py" not in line]) == 1


def _by_worker_groups(world: World, names: tuple[str, ...]) -> tuple[dict[str, Parameters], list[str]]:
    found = {}
    with said() as lines:
        for name in names:
            model = plain_model()
            outer = rw.local_sgd(model, every=1)
            found[name] = train(model, step_of(EXACT[name]), world.rank, world.world_size)
            outer.synchronize()
    return found, lines


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rounds_of_one_step_weigh_means_by_what_they_are_over(num_ranks: int) -> None:
    names = tuple(name for name in BY_WORKER_GROUPS if name in MEANS)
    plain = {name: train(plain_model(), step_of(EXACT[name]), 0, 1) for name in names}
    for result in testing.run_ranks(_by_worker_groups, num_ranks, names):
        got, lines = result.get()
        apart = {name: largest_difference(got[name], plain[name]) for name in names}
        assert {name: value for name, value in apart.items() if value > TOLERANCE} == {}
        assert [line for line in lines if "loss (" in line] == []


def test_a_sum_on_worker_groups_is_warned_of_once() -> None:
    lines = [line for result in testing.run_ranks(_by_worker_groups, 2, ("mse_sum",)) for line in result.get()[1]]
    assert len([line for line in lines if "is a sum over samples: each of the 2 worker groups" in line]) == 1
