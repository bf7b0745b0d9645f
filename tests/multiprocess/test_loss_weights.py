# SPDX-License-Identifier: Apache-2.0
"""`replicate`: whatever a loss is a mean or a sum over, N ranks compute what the plain script computes on one."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch
from loss_steps import STEPS, LossAlone, LossInside, data, plain_model, said, step_of, train, two_steps_of
from losses import COUPLED, EXACT
from replicas import TOLERANCE, Parameters, largest_difference, part
from torch import nn
from torch.nn import functional

import rankwise as rw
from rankwise.comm.leave import fail
from rankwise.errors import ConfigurationError, PeerFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from losses import Loss
    from on_ranks import RunRanks

    from rankwise.world.facts import World


TWICE = ("mse_sum", "class_weights", "masked", "mean_and_sum", "vae")
"""What two backward passes are tried with on fewer than four ranks."""


def _names(*, is_some: bool) -> tuple[str, ...]:
    return TWICE if is_some else tuple(EXACT)


def _on_ranks(world: World, twice: bool) -> dict[str, Parameters]:
    make = two_steps_of if twice else step_of
    return {
        name: train(rw.replicate(plain_model()), make(EXACT[name]), world.rank, world.world_size)
        for name in _names(is_some=twice and world.world_size < 4)
    }


@cache
def _exact(name: str, twice: bool) -> Parameters:
    """Return what one device comes to. Kept, since it is the same for every number of ranks."""
    return train(plain_model(), (two_steps_of if twice else step_of)(EXACT[name]), 0, 1)


@pytest.mark.parametrize("twice", [False, True], ids=["one_backward", "two_backwards"])
@pytest.mark.parametrize("world_size", [4, 3, 2])
def test_losses_are_exact(run_ranks: RunRanks, world_size: int, twice: bool) -> None:
    for result in run_ranks(_on_ranks, world_size, twice):
        parts = {name: largest_difference(got, _exact(name, twice)) for name, got in result.get().items()}
        assert set(parts) == set(_names(is_some=twice and world_size < 4))
        assert {name: apart for name, apart in parts.items() if apart > TOLERANCE} == {}


def _loops_on_ranks(world: World) -> dict[str, Parameters]:
    return {
        name: train(rw.replicate(plain_model()), step, world.rank, world.world_size) for name, step in STEPS.items()
    }


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_loops_are_exact(run_ranks: RunRanks, num_ranks: int) -> None:
    plain = {name: train(plain_model(), step, 0, 1) for name, step in STEPS.items()}
    for result in run_ranks(_loops_on_ranks, num_ranks):
        apart = {name: largest_difference(got, plain[name]) for name, got in result.get().items()}
        assert {name: value for name, value in apart.items() if value > TOLERANCE} == {}


def _inside(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    model(x, y)["loss"].backward()


def _by_method(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    assert isinstance(model, LossInside)
    model.training_step(x, y).backward()


def _inside_on_ranks(world: World) -> list[Parameters]:
    trained = [train(rw.replicate(LossInside()), _inside, world.rank, world.world_size)]
    # What bypasses forward does not say how many samples it has: a rank without any needs one that it leaves out.
    trained.append(train(rw.replicate(LossInside()), _by_method, world.rank, world.world_size))
    return trained


def test_a_loss_computed_inside_the_model_is_exact(run_ranks: RunRanks) -> None:
    plain = [train(LossInside(), _inside, 0, 1), train(LossInside(), _by_method, 0, 1)]
    for result in run_ranks(_inside_on_ranks, 3):
        for got, expected in zip(result.get(), plain, strict=True):
            assert largest_difference(got, expected) < TOLERANCE


def _alone(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    model(x, y).backward()


def _alone_on_ranks(world: World) -> tuple[Parameters, list[str]]:
    with said() as lines:
        model = rw.replicate(LossAlone(), sync_batchnorm=True)
        return train(model, _alone, world.rank, world.world_size), lines


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_loss_behind_synchronized_statistics_is_exact(run_ranks: RunRanks, num_ranks: int) -> None:
    plain = train(LossAlone(), _alone, 0, 1)
    for result in run_ranks(_alone_on_ranks, num_ranks):
        got, lines = result.get()
        assert largest_difference(got, plain) < TOLERANCE
        assert not [line for line in lines if "neither a mean nor a sum" in line]


def _accumulate(model: nn.Module, loss: Loss, rank: int, of: int, *, microsteps: int) -> Parameters:
    x, y = data()[0]
    for index in range(microsteps):
        mine_x, mine_y = (part(part(one, index, microsteps), rank, of) for one in (x, y))
        with rw.no_sync(model) if index < microsteps - 1 else nullcontext():
            loss(model(mine_x), mine_y, mine_x).backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


ACCUMULATED = (
    "sum",
    "cross_entropy_sum",
    "vae",
    "half_a_sum",
    "class_weights",
    "ignore_index",
    "masked_by_index",
    "mse",
)


def _accumulated_on_ranks(world: World) -> dict[str, Parameters]:
    return {
        name: _accumulate(rw.replicate(plain_model()), EXACT[name], world.rank, world.world_size, microsteps=3)
        for name in ACCUMULATED
    }


def test_accumulated_sums_and_weighted_means_are_exact(run_ranks: RunRanks) -> None:
    x, y = data()[0]
    for num_ranks in (1, 2):
        for result in run_ranks(_accumulated_on_ranks, num_ranks):
            for name, got in result.get().items():
                model = plain_model()
                EXACT[name](model(x), y, x).backward()
                expected = {key: one.grad for key, one in model.named_parameters() if one.grad is not None}
                assert largest_difference(got, expected) < TOLERANCE, name


def _adversarial(generator: nn.Module, critic: nn.Module, rank: int, of: int) -> Parameters:
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (generator, critic)]
    for x, y in data():
        real, noise = part(y, rank, of), part(x, rank, of)
        fake = generator(noise)
        optimizers[1].zero_grad()
        (-critic(real).mean() + functional.softplus(critic(fake.detach())).sum()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (functional.softplus(-critic(fake)).sum() + 0.1 * fake.abs().mean()).backward()
        optimizers[0].step()
    state = {f"generator.{key}": value.detach().clone() for key, value in generator.state_dict().items()}
    return state | {f"critic.{key}": value.detach().clone() for key, value in critic.state_dict().items()}


def _critic(norm: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), norm(6), nn.Tanh(), nn.Linear(6, 1)).double()


def _adversarial_on_ranks(world: World, norm: type[nn.Module]) -> Parameters:
    critic = rw.replicate(_critic(norm), sync_batchnorm=True)
    return _adversarial(rw.replicate(plain_model()), critic, world.rank, world.world_size)


@pytest.mark.parametrize("norm", [nn.Identity, nn.BatchNorm1d])
def test_two_models_that_a_loss_crosses_are_exact(run_ranks: RunRanks, norm: type[nn.Module]) -> None:
    plain = _adversarial(plain_model(), _critic(norm), 0, 1)
    for num_ranks in (2, 4):
        for result in run_ranks(_adversarial_on_ranks, num_ranks, norm):
            assert largest_difference(result.get(), plain) < TOLERANCE


def _coupled(world: World, name: str) -> list[str]:
    with said() as lines:
        model = rw.replicate(plain_model())
        for _ in range(3):
            x, y = (part(one, world.rank, world.world_size) for one in data()[0])
            COUPLED[name][0](model(x), y, x).backward()
    return [line for line in lines if "neither a mean nor a sum" in line]


@pytest.mark.parametrize("name", COUPLED)
def test_a_loss_that_couples_samples_is_named_once_with_its_line(run_ranks: RunRanks, name: str) -> None:
    lines = [result.get() for result in run_ranks(_coupled, 2, name)]
    assert len(lines[0]) == 1
    assert f"because of {COUPLED[name][1]}" in lines[0][0]
    assert "test_loss_weights.py:" in lines[0][0]
    assert lines[1] == []


def _ambiguous(world: World) -> None:
    model = rw.replicate(plain_model())
    x, y = (part(one, world.rank, world.world_size) for one in data()[1])
    # Four is the global batch, and the number of elements of a sample.
    (((model(x[:1]) - y[:1]) ** 2).sum() / 4).backward()


def _contradicted(world: World) -> None:
    model = rw.replicate(plain_model())
    for x, y in ((torch.ones(3, 3), torch.ones(3, 4)), (torch.ones(2, 3), torch.ones(2, 4))):
        (((model(x.double()) - y.double()) ** 2).sum() / 3).backward()


def _of_other_terms(world: World) -> None:
    model = rw.replicate(plain_model())
    x, y = (part(one, world.rank, world.world_size) for one in data()[0])
    loss = functional.mse_loss(model(x), y)
    if world.rank == 1:
        loss = loss + model(x).abs().mean()
    loss.backward()


def _in_two_units(world: World) -> None:
    model = rw.replicate(plain_model())
    x, y = (part(one, world.rank, world.world_size) for one in data()[0])
    with rw.no_sync(model):
        functional.mse_loss(model(x), y).backward()
    with rw.weight(model, len(x)):
        functional.mse_loss(model(x), y).backward()


@pytest.mark.parametrize(
    ("trains", "message"),
    [
        (_in_two_units, "weight their losses in different units"),
        (_ambiguous, "divided by 4, which is ambiguous"),
        (_contradicted, "divided by 3, which is ambiguous"),
        (_of_other_terms, "does not have the same terms on all ranks"),
    ],
)
def test_an_ambiguous_loss_is_an_error(run_ranks: RunRanks, trains: Callable[[World], None], message: str) -> None:
    for result in run_ranks(trains, 2):
        with pytest.raises((ConfigurationError, PeerFailed)) as caught:
            result.get()
        assert message in str(caught.value)


def _given(world: World, how: str) -> Parameters:
    def weight(x: torch.Tensor) -> float:
        return float(len(x))

    model = rw.replicate(plain_model(), weight=weight if how == "weight=" else None)
    x, y = (part(one, world.rank, world.world_size) for one in data()[0])
    loss = functional.mse_loss(model(x), y, reduction="sum") / len(x)
    with rw.weight(model, len(x)) if how == "weight()" else nullcontext():
        loss.sqrt().square().backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("how", ["weight=", "weight()"])
def test_a_given_weight_overrides_the_reading_of_the_loss(run_ranks: RunRanks, how: str) -> None:
    x, y = data()[0]
    model = plain_model()
    (functional.mse_loss(model(x), y, reduction="sum") / len(x)).backward()
    expected = {key: one.grad for key, one in model.named_parameters() if one.grad is not None}
    for result in run_ranks(_given, 2, how):
        assert largest_difference(result.get(), expected) < TOLERANCE


def _left(world: World, by_error: bool) -> tuple[str, str]:
    del world
    rw.replicate(plain_model())
    during = torch.autograd.backward.__module__
    if by_error:
        fail(ValueError("broken"))
    else:
        rw.leave()
    return during, torch.autograd.backward.__module__


@pytest.mark.parametrize("by_error", [False, True])
def test_torchs_backward_is_put_back_when_the_world_is_left(run_ranks: RunRanks, by_error: bool) -> None:
    for result in run_ranks(_left, 1 if by_error else 2, by_error):
        assert result.get() == ("rankwise.comm.step_hooks", "torch.autograd")


def _two_sums(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    # By their operations they are alike. With the last batch but one each could be read in both ways.
    ((model(x) - y).square().sum() / len(x)).backward()
    ((model(x) - y).square().sum() / 2).backward()


def _two_sums_on_ranks(world: World) -> Parameters:
    return train(rw.replicate(plain_model()), _two_sums, world.rank, world.world_size)


def test_sums_of_two_lines_are_read_each_by_itself(run_ranks: RunRanks) -> None:
    plain = train(plain_model(), _two_sums, 0, 1)
    for result in run_ranks(_two_sums_on_ranks, 2):
        assert largest_difference(result.get(), plain) < TOLERANCE
