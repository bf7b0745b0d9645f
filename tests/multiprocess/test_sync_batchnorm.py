# SPDX-License-Identifier: Apache-2.0
"""torch's SyncBatchNorm, as DDP scripts have it, under each strategy on CPUs: its statistics are one device's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from loss_steps import said, whole
from replicas import TOLERANCE, largest_difference
from staged_models import drawn
from torch import nn
from torch.nn import functional

import rankwise as rw
from rankwise import testing

if TYPE_CHECKING:
    from collections.abc import Callable

    from replicas import Parameters

    from rankwise.world.facts import World

    Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

SIZES = (6, 9, 5, 2)
"""Of the batches: the last leaves none for one of three ranks."""
LOSSES: dict[str, Loss] = {
    "mean": functional.mse_loss,
    "sum": lambda output, y: functional.mse_loss(output, y, reduction="sum") / 7.5,
    "terms": lambda output, y: functional.mse_loss(output, y) + 0.1 * (output**2).sum(),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU()]
    perceptron = [nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)]  # which tensor_parallel splits
    return nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(*layers, *perceptron).double())


def _train(
    model: nn.Module, backward: Callable[[torch.Tensor, torch.Tensor], object], part: int, of: int, *, microsteps: bool
) -> Parameters:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, size in enumerate(SIZES):
        x, y = drawn(size, 5, seed=number), drawn(size, 2, seed=number + 10)
        is_last = not microsteps or number % 2 == 1
        if is_last or of == 0:
            backward(x.tensor_split(of or 1)[part], y.tensor_split(of or 1)[part])
        else:
            with rw.no_sync(model):
                backward(x.tensor_split(of)[part], y.tensor_split(of)[part])
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return whole({name: one for name, one in model.state_dict().items() if not one.is_meta})


def _plain(loss: str) -> Parameters:
    model = network()
    return _train(model, lambda x, y: LOSSES[loss](model(x), y).backward(), 0, 0, microsteps=False)


AXES: dict[str, dict[str, int]] = {
    "tensor_parallel": {"tp": -1},
    "pipeline": {"pp": -1},
    "tensor_parallel and replicate": {"tp": 2, "dp_replicate": -1},
    "tensor_parallel and shard": {"tp": 2, "dp_shard": -1},
    "shard of copies": {"dp_replicate": 2, "dp_shard": -1},
}


def _on_ranks(world: World, how: str, loss: str) -> Parameters:
    model, fn = network(), LOSSES[loss]
    axes = AXES.get(how, {})
    if axes:
        rw.mesh(**axes)
    part, of = (world.rank, world.world_size) if "tp" not in axes and "pp" not in axes else (0, 1)
    if "tensor_parallel" in how:
        rw.tensor_parallel(model)
        if " and " in how:
            part, of = world.rank // 2, world.world_size // 2
    if how == "pipeline":
        step = rw.pipeline(model, fn, example=drawn(6, 5), micro_batches=1)
        return _train(model, step, 0, 1, microsteps=False)
    if "replicate" in how:
        rw.replicate(model)
    elif "shard" in how:
        rw.shard(model, blocks=["0", "1", "3"], recompute=["1"] if how == "shard, recomputed" else False)
    return _train(model, lambda x, y: fn(model(x), y).backward(), part, of, microsteps=False)


@pytest.mark.parametrize(
    ("how", "loss", "num_ranks"),
    [
        *[("replicate", "mean", number) for number in (1, 3)],
        *[("shard", "mean", number) for number in (1, 2, 3)],
        ("shard", "sum", 3),
        ("shard", "terms", 3),
        ("shard, recomputed", "mean", 2),
        ("shard of copies", "mean", 4),
        *[("pipeline", "mean", number) for number in (1, 2)],
        *[("tensor_parallel", "mean", number) for number in (1, 2)],
        ("tensor_parallel and replicate", "mean", 4),
        ("tensor_parallel and shard", "mean", 4),
    ],
)
def test_statistics_are_those_of_one_device(how: str, loss: str, num_ranks: int) -> None:
    expected = _plain(loss)
    for result in testing.run_ranks(_on_ranks, num_ranks, how, loss):
        found = result.get()
        assert largest_difference(found, {name: expected[name] for name in found}) <= TOLERANCE


def _accumulated(world: World, how: str) -> Parameters:
    model = network()
    rw.shard(model) if how == "shard" else rw.replicate(model)
    return _train(
        model, lambda x, y: functional.mse_loss(model(x), y).backward(), world.rank, world.world_size, microsteps=True
    )


def test_accumulated_gradients_of_shard_are_those_of_replicate() -> None:
    """Each microstep has statistics of its own."""
    expected = testing.run_ranks(_accumulated, 1, "replicate")[0].get()
    for result in testing.run_ranks(_accumulated, 3, "shard"):
        assert largest_difference(result.get(), expected) <= TOLERANCE


def _apart(world: World, how: str) -> bool:
    """Train where ranks do not wait for each other: their statistics are their own."""
    model = network()
    if how == "local_sgd":
        rw.local_sgd(model, every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    server = rw.parameter_server(model, optimizer, mode="async") if how == "parameter_server" else None
    if server is not None and server.is_server:
        server.serve()
        return True
    for number in range(2 if server is None else 2 + 2 * world.rank):
        functional.mse_loss(model(drawn(4, 5, seed=number)), drawn(4, 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if server is not None:
        server.finish()
    return True


@pytest.mark.parametrize("how", ["local_sgd", "parameter_server"])
def test_ranks_that_train_apart_have_statistics_of_their_own(how: str) -> None:
    assert all(result.get() for result in testing.run_ranks(_apart, 3, how))


def _per_rank(_: World, how: str) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.Tanh()).double()
    with said() as lines:
        if how == "pipeline":
            rw.mesh(pp=2, dp_replicate=2)
            step = rw.pipeline(model, functional.mse_loss, example=drawn(6, 5), micro_batches=1)
            step(drawn(6, 5), drawn(6, 2))
        else:
            rw.shard(model)(drawn(6, 5))
    return [line for line in lines if "statistics" in line]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("pipeline", "'1' takes its statistics per micro-batch of each copy; GroupNorm makes the result that of one"),
        ("shard", "call model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before shard()"),
    ],
)
def test_statistics_that_are_not_exact_are_named(how: str, text: str) -> None:
    first, *_ = testing.run_ranks(_per_rank, 4, how)
    (line,) = first.get()
    assert text in line
