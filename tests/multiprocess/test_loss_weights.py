# SPDX-License-Identifier: Apache-2.0
"""`replicate`: whatever a loss is a mean or a sum over, N ranks compute what the plain script computes on one."""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import pytest
import torch
from losses import CLASS_WEIGHTS, COUPLED, EXACT, labels
from replicas import TOLERANCE, Parameters, largest_difference, part
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import rankwise as rw
from rankwise.errors import ConfigurationError, PeerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from losses import Loss
    from on_ranks import RunRanks

    from rankwise.world import World

    Step = Callable[[nn.Module, torch.Tensor, torch.Tensor], None]
    """Computes a loss of inputs [batch, 3] and targets [batch, 4], and calls backward."""

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


def _train(model: nn.Module, step: Step, rank: int, of: int) -> Parameters:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for x, y in _data():
        optimizer.zero_grad()
        step(model, part(x, rank, of), part(y, rank, of))
        optimizer.step()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def _step(loss: Loss) -> Step:
    return lambda model, x, y: loss(model(x), y, x).backward()


def _step_twice(loss: Loss) -> Step:
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


def _weight_decay(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
    (functional.mse_loss(model(x), y) + 0.1 * penalty).backward()


def _weight_decay_and_sum(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    penalty = sum(parameter.abs().sum() for parameter in model.parameters())
    (functional.mse_loss(model(x), y, reduction="sum") + 0.1 * penalty).backward()


def _penalties(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    norms = sum(one.norm() for one in weights)
    unlike_orthogonal = sum((one.T @ one - torch.eye(one.shape[1])).pow(2).sum() for one in weights)
    (functional.mse_loss(model(x), y, reduction="sum") + norms + 0.1 * unlike_orthogonal).backward()


def _gradient_penalty(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (functional.mse_loss(output, y) + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()).backward()


def _scaled(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(functional.cross_entropy(model(x), labels(y), weight=CLASS_WEIGHTS)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(1024.0)


def _two_roots(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    output = model(x)
    roots = [
        functional.mse_loss(output, y, reduction="sum"),
        functional.cross_entropy(output, labels(y), weight=CLASS_WEIGHTS),
    ]
    torch.autograd.backward(roots)


def _some_inputs(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    inputs = [parameter for name, parameter in model.named_parameters() if "weight" in name]
    functional.mse_loss(model(x), y, reduction="sum").backward(inputs=inputs)


def _same_graph_twice(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = functional.mse_loss(model(x), y, reduction="sum") + functional.l1_loss(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()


def _checkpointed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    output = model(x)
    loss = checkpoint(lambda o: functional.mse_loss(o, y, reduction="sum"), output, use_reentrant=False)
    assert isinstance(loss, torch.Tensor)
    loss.backward()


def _sequence_first(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    steps = torch.stack([x, x * 2, x.cos(), x + 1, x.sin()])
    ((model(steps) - y) ** 2).mean().backward()


def _tokens(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    lengths = (y[:, 1].abs() * 3).long().tolist()
    outputs = model(x)
    tokens = torch.cat([outputs[i].expand(n, 4) for i, n in enumerate(lengths)]) if lengths else outputs
    classes = torch.cat([labels(y)[i].expand(n) for i, n in enumerate(lengths)]) if lengths else labels(y)
    functional.cross_entropy(tokens, classes).backward()


class _LossInside(nn.Module):
    """Computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _model()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.inner(x)
        return {"loss": functional.cross_entropy(output, labels(y), weight=CLASS_WEIGHTS), "output": output}

    def training_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.inner(x), y, reduction="sum")


STEPS: dict[str, Step] = {
    "weight_decay": _weight_decay,
    "weight_decay_and_sum": _weight_decay_and_sum,
    "penalties": _penalties,
    "gradient_penalty": _gradient_penalty,
    "scaled": _scaled,
    "two_roots": _two_roots,
    "some_inputs": _some_inputs,
    "same_graph_twice": _same_graph_twice,
    "checkpointed": _checkpointed,
    "sequence_first": _sequence_first,
    "tokens": _tokens,
}


def _loops_on_ranks(world: World) -> dict[str, Parameters]:
    return {name: _train(rw.replicate(_model()), step, world.rank, world.world_size) for name, step in STEPS.items()}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_loops_are_exact(run_ranks: RunRanks, num_ranks: int) -> None:
    plain = {name: _train(_model(), step, 0, 1) for name, step in STEPS.items()}
    for result in run_ranks(_loops_on_ranks, num_ranks):
        apart = {name: largest_difference(got, plain[name]) for name, got in result.get().items()}
        assert {name: value for name, value in apart.items() if value > TOLERANCE} == {}


def _inside(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    model(x, y)["loss"].backward()


def _by_method(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    assert isinstance(model, _LossInside)
    model.training_step(x, y).backward()


def _inside_on_ranks(world: World) -> list[Parameters]:
    trained = [_train(rw.replicate(_LossInside()), _inside, world.rank, world.world_size)]
    # What bypasses forward does not say how many samples it has: a rank without any needs one that it leaves out.
    trained.append(_train(rw.replicate(_LossInside()), _by_method, world.rank, world.world_size))
    return trained


def test_a_loss_computed_inside_the_model_is_exact(run_ranks: RunRanks) -> None:
    plain = [_train(_LossInside(), _inside, 0, 1), _train(_LossInside(), _by_method, 0, 1)]
    for result in run_ranks(_inside_on_ranks, 3):
        for got, expected in zip(result.get(), plain, strict=True):
            assert largest_difference(got, expected) < TOLERANCE


def _accumulate(model: nn.Module, loss: Loss, rank: int, of: int, *, microsteps: int) -> Parameters:
    x, y = _data()[0]
    for index in range(microsteps):
        mine_x, mine_y = (part(part(one, index, microsteps), rank, of) for one in (x, y))
        with rw.no_sync(model) if index < microsteps - 1 else nullcontext():
            loss(model(mine_x), mine_y, mine_x).backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


ACCUMULATED = ("sum", "cross_entropy_sum", "class_weights", "ignore_index", "masked_by_index", "mse")


def _accumulated_on_ranks(world: World) -> dict[str, Parameters]:
    return {
        name: _accumulate(rw.replicate(_model()), EXACT[name], world.rank, world.world_size, microsteps=3)
        for name in ACCUMULATED
    }


def test_accumulated_sums_and_weighted_means_are_exact(run_ranks: RunRanks) -> None:
    x, y = _data()[0]
    for num_ranks in (1, 2):
        for result in run_ranks(_accumulated_on_ranks, num_ranks):
            for name, got in result.get().items():
                model = _model()
                EXACT[name](model(x), y, x).backward()
                expected = {key: one.grad for key, one in model.named_parameters() if one.grad is not None}
                assert largest_difference(got, expected) < TOLERANCE, name


def _adversarial(generator: nn.Module, critic: nn.Module, rank: int, of: int) -> Parameters:
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (generator, critic)]
    for x, y in _data():
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


def _critic() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def _adversarial_on_ranks(world: World) -> Parameters:
    return _adversarial(rw.replicate(_model()), rw.replicate(_critic()), world.rank, world.world_size)


def test_two_models_that_a_loss_crosses_are_exact(run_ranks: RunRanks) -> None:
    plain = _adversarial(_model(), _critic(), 0, 1)
    for num_ranks in (2, 4):
        for result in run_ranks(_adversarial_on_ranks, num_ranks):
            assert largest_difference(result.get(), plain) < TOLERANCE


@contextmanager
def _warnings() -> Generator[list[str]]:
    """Give what rankwise's log says on this rank inside the block."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("rankwise")
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def _coupled(world: World, name: str) -> list[str]:
    with _warnings() as lines:
        model = rw.replicate(_model())
        for _ in range(3):
            x, y = (part(one, world.rank, world.world_size) for one in _data()[0])
            COUPLED[name][0](model(x), y, x).backward()
    return [line for line in lines if "neither a mean nor a sum" in line]


@pytest.mark.parametrize("name", COUPLED)
def test_what_couples_samples_is_named_once_with_its_line(run_ranks: RunRanks, name: str) -> None:
    lines = [result.get() for result in run_ranks(_coupled, 2, name)]
    assert len(lines[0]) == 1
    assert f"because of {COUPLED[name][1]}" in lines[0][0]
    assert "test_loss_weights.py:" in lines[0][0]
    assert lines[1] == []


def _ambiguous(world: World) -> None:
    model = rw.replicate(_model())
    x, y = (part(one, world.rank, world.world_size) for one in _data()[1])
    # Four is the global batch, and the number of elements of a sample.
    (((model(x[:1]) - y[:1]) ** 2).sum() / 4).backward()


def _contradicted(world: World) -> None:
    model = rw.replicate(_model())
    for x, y in ((torch.ones(3, 3), torch.ones(3, 4)), (torch.ones(2, 3), torch.ones(2, 4))):
        (((model(x.double()) - y.double()) ** 2).sum() / 3).backward()


def _of_other_terms(world: World) -> None:
    model = rw.replicate(_model())
    x, y = (part(one, world.rank, world.world_size) for one in _data()[0])
    loss = functional.mse_loss(model(x), y)
    if world.rank == 1:
        loss = loss + model(x).abs().mean()
    loss.backward()


def _in_two_units(world: World) -> None:
    model = rw.replicate(_model())
    x, y = (part(one, world.rank, world.world_size) for one in _data()[0])
    with rw.no_sync(model):
        functional.mse_loss(model(x), y).backward()
    with rw.weight(model, len(x)):
        functional.mse_loss(model(x), y).backward()


@pytest.mark.parametrize(
    ("trains", "message"),
    [
        (_in_two_units, "weigh their losses in different units"),
        (_ambiguous, "divided by 4, which can be read in two ways"),
        (_contradicted, "divided by 3, which can be read in two ways"),
        (_of_other_terms, "is not of the same terms on all ranks"),
    ],
)
def test_what_can_be_read_in_two_ways_is_an_error(
    run_ranks: RunRanks, trains: Callable[[World], None], message: str
) -> None:
    for result in run_ranks(trains, 2):
        with pytest.raises((ConfigurationError, PeerFailed)) as caught:
            result.get()
        assert message in str(caught.value)


def _given(world: World, how: str) -> Parameters:
    def weight(x: torch.Tensor) -> float:
        return float(len(x))

    model = rw.replicate(_model(), weight=weight if how == "weight=" else None)
    x, y = (part(one, world.rank, world.world_size) for one in _data()[0])
    loss = functional.mse_loss(model(x), y, reduction="sum") / len(x)
    with rw.weight(model, len(x)) if how == "weight()" else nullcontext():
        loss.sqrt().square().backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("how", ["weight=", "weight()"])
def test_a_given_weight_has_the_last_word(run_ranks: RunRanks, how: str) -> None:
    x, y = _data()[0]
    model = _model()
    (functional.mse_loss(model(x), y, reduction="sum") / len(x)).backward()
    expected = {key: one.grad for key, one in model.named_parameters() if one.grad is not None}
    for result in run_ranks(_given, 2, how):
        assert largest_difference(result.get(), expected) < TOLERANCE


def _left(world: World) -> tuple[bool, bool]:
    del world
    before = torch.autograd.backward.__module__
    rw.replicate(_model())
    during = torch.autograd.backward.__module__
    rw.leave()
    return during != before, torch.autograd.backward.__module__ == before


def test_leave_puts_torchs_backward_back(run_ranks: RunRanks) -> None:
    for result in run_ranks(_left, 2):
        assert result.get() == (True, True)
