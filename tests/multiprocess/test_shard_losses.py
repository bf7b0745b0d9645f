# SPDX-License-Identifier: Apache-2.0
"""`shard`: whatever a loss is a mean or a sum over, N ranks compute what the plain script computes on one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
from loss_steps import STEPS, data, gradients, plain_model, said, step_of, train, two_steps_of
from losses import COUPLED, EXACT
from replicas import TOLERANCE, largest_difference, part
from torch import nn
from torch.nn import functional

import rankwise as rw
from rankwise import testing
from rankwise.errors import ConfigurationError, PeerFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from loss_steps import Step
    from losses import Loss
    from replicas import Parameters

    from rankwise.world.facts import World

OF_PARAMETERS = {"weight_decay", "weight_decay_and_sum", "penalties"}
"""Steps that compute with parameters, of which each rank has a part."""
OF_GRADIENTS = {"gradient_penalty", "some_inputs"}
"""Steps that ask for certain gradients, which torch's fully_shard cannot give."""
TWICE = ("mse_sum", "class_weights", "masked", "mean_and_sum", "vae")
ACCUMULATED = ("sum", "cross_entropy_sum", "class_weights", "masked_by_index", "mse")
SHARDED_STEPS = {name: step for name, step in STEPS.items() if name not in OF_PARAMETERS | OF_GRADIENTS}


def _steps(*, only_some: bool) -> dict[str, Step]:
    one = {name: step_of(loss) for name, loss in EXACT.items()} | SHARDED_STEPS
    two = {f"two backwards of {name}": two_steps_of(EXACT[name]) for name in TWICE}
    return {name: step for name, step in (one | two).items() if not only_some or name in (*TWICE, *two)}


def _on_ranks(world: World, sizes: dict[str, int]) -> dict[str, Parameters]:
    if sizes:
        rw.mesh(**sizes)
    return {
        name: train(rw.shard(plain_model(), blocks=["0"]), step, world.rank, world.world_size)
        for name, step in _steps(only_some=_is_short(world.world_size)).items()
    }


def _is_short(world_size: int) -> bool:
    """Whether some of the losses are enough: three ranks, whose shares are unequal, have all."""
    return world_size in {2, 4}


@pytest.mark.parametrize(("world_size", "sizes"), [(1, {}), (2, {}), (3, {}), (4, {"dp_replicate": 2, "dp_shard": 2})])
def test_losses_are_exact(world_size: int, sizes: dict[str, int]) -> None:
    plain = {name: train(plain_model(), step, 0, 1) for name, step in _steps(only_some=_is_short(world_size)).items()}
    for result in testing.run_ranks(_on_ranks, world_size, sizes):
        apart = {name: largest_difference(got, plain[name]) for name, got in result.get().items()}
        assert {name: value for name, value in apart.items() if value > TOLERANCE} == {}


def _accumulated(model: nn.Module, loss: Loss, rank: int, of: int) -> Parameters:
    x, y = data()[0]
    for index in range(3):
        mine_x, mine_y = (part(part(one, index, 3), rank, of) for one in (x, y))
        with rw.no_sync(model) if index < 2 else nullcontext():
            loss(model(mine_x), mine_y, mine_x).backward()
    return gradients(model)


def _accumulated_on_ranks(world: World) -> dict[str, Parameters]:
    return {
        name: _accumulated(rw.shard(plain_model()), EXACT[name], world.rank, world.world_size) for name in ACCUMULATED
    }


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_accumulated_sums_and_weighted_means_are_exact(num_ranks: int) -> None:
    x, y = data()[0]
    for result in testing.run_ranks(_accumulated_on_ranks, num_ranks):
        for name, got in result.get().items():
            model = plain_model()
            EXACT[name](model(x), y, x).backward()
            assert largest_difference(got, gradients(model)) < TOLERANCE, name


class LossInside(nn.Module):
    """Computes its loss itself, from outputs of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = plain_model()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.inner(x), y, reduction="sum")


def _inside(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    model(x, y).backward()


def _inside_on_ranks(world: World) -> tuple[Parameters, list[str]]:
    with said() as lines:
        model = rw.shard(LossInside(), blocks=["inner.0", "inner.2"])
        return train(model, _inside, world.rank, world.world_size), lines


def test_a_loss_computed_inside_the_model_is_exact_and_not_warned_of() -> None:
    plain = train(LossInside(), _inside, 0, 1)
    for result in testing.run_ranks(_inside_on_ranks, 3):
        got, lines = result.get()
        assert largest_difference(got, plain) < TOLERANCE
        assert [line for line in lines if "neither a mean" in line] == []


def _coupled(world: World, name: str) -> list[str]:
    with said() as lines:
        model = rw.shard(plain_model())
        for _ in range(3):
            x, y = (part(one, world.rank, world.world_size) for one in data()[0])
            COUPLED[name][0](model(x), y, x).backward()
    return [line for line in lines if "neither a mean nor a sum" in line]


@pytest.mark.parametrize("name", ["rmse", "contrastive"])
def test_a_loss_that_couples_samples_is_named_once_with_its_line(name: str) -> None:
    lines = [result.get() for result in testing.run_ranks(_coupled, 2, name)]
    assert [len(one) for one in lines] == [1, 0]
    assert f"because of {COUPLED[name][1]}" in lines[0][0]
    assert "test_shard_losses.py:" in lines[0][0]


def _of_other_terms(world: World) -> None:
    model = rw.shard(plain_model())
    x, y = (part(one, world.rank, world.world_size) for one in data()[0])
    output = model(x)
    loss = functional.mse_loss(output, y)
    (loss + output.abs().mean() if world.rank == 1 else loss).backward()


def _in_two_units(world: World) -> None:
    model = rw.shard(plain_model())
    x, y = (part(one, world.rank, world.world_size) for one in data()[0])
    with rw.no_sync(model):
        functional.mse_loss(model(x), y).backward()
    with rw.weight(model, len(x)):
        functional.mse_loss(model(x), y).backward()


def _some_inputs(world: World) -> None:
    model = rw.shard(plain_model())
    x, y = (part(one, world.rank, world.world_size) for one in data()[0])
    functional.mse_loss(model(x), y).backward(inputs=list(model.parameters())[:1])


@pytest.mark.parametrize(
    ("trains", "message"),
    [
        (_of_other_terms, "does not have the same terms on all ranks"),
        (_in_two_units, "weight their losses in different units"),
        (_some_inputs, "backward(inputs=...) was given parameters of a sharded model"),
    ],
)
def test_a_result_that_cannot_be_exact_is_an_error(trains: Callable[[World], None], message: str) -> None:
    for result in testing.run_ranks(trains, 2):
        with pytest.raises((ConfigurationError, PeerFailed)) as caught:
            result.get()
        assert message in str(caught.value)
