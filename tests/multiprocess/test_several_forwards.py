# SPDX-License-Identifier: Apache-2.0
"""A loss of several forward passes, of which some have no samples on a rank: N ranks compute what one computes.

As with labelled and unlabelled batches, two loaders of unlike lengths, or a physics-informed net's boundary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from loss_steps import whole
from replicas import TOLERANCE, largest_difference, part
from torch import nn
from torch.nn import functional

import rankwise as rw
from rankwise.errors import ConfigurationError, PeerFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from on_ranks import RunRanks
    from replicas import Parameters

    from rankwise.world.facts import World

    Batch = tuple[torch.Tensor, torch.Tensor]
    Loss = Callable[[nn.Module, nn.Module, Batch, Batch], torch.Tensor]
    """Of two models, which may be one, and a batch of each of two loaders."""

SIZES = ((9, 7), (1, 8), (8, 1), (2, 2), (1, 2), (6, 5))
"""Of the two batches in each step."""


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def _batches(rank: int, of: int) -> list[tuple[Batch, Batch]]:
    generator = torch.Generator().manual_seed(1)

    def own(size: int) -> Batch:
        shapes = ((size, 5), (size, 1))
        x, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        return part(x, rank, of), part(y, rank, of)

    return [(own(first), own(second)) for first, second in SIZES]


def _mse(model: nn.Module, batch: Batch, reduction: str = "mean") -> torch.Tensor:
    return functional.mse_loss(model(batch[0]), batch[1], reduction=reduction)


def _over_their_lengths(m: nn.Module, n: nn.Module, a: Batch, b: Batch) -> torch.Tensor:
    return sum((_mse(one, each, "sum") / max(len(each[0]), 1) for one, each in ((m, a), (n, b))), torch.zeros(()))


def _joined(m: nn.Module, n: nn.Module, a: Batch, b: Batch) -> torch.Tensor:
    return functional.mse_loss(torch.cat([m(a[0]), n(b[0])]), torch.cat([a[1], b[1]]))


def _masked(m: nn.Module, n: nn.Module, a: Batch, b: Batch) -> torch.Tensor:
    mask = a[1] > 0
    return (_mse(m, a, "none") * mask).sum() / mask.sum().clamp_min(1) + _mse(n, b)


def _consistency(m: nn.Module, n: nn.Module, a: Batch, b: Batch) -> torch.Tensor:
    with torch.no_grad():
        target = n(b[0])
    return _mse(m, a) + functional.mse_loss(n(b[0] + 0.1), target)


def _adversarial(m: nn.Module, n: nn.Module, a: Batch, b: Batch) -> torch.Tensor:
    return functional.softplus(-m(a[0])).mean() + functional.softplus(n(b[0])).mean()


def _physics(m: nn.Module, n: nn.Module, a: Batch, b: Batch) -> torch.Tensor:
    x = a[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
    return (slope[:, 0] - a[1][:, 0]).square().mean() + _mse(n, b)


LOSSES: dict[str, Loss] = {
    "means": lambda m, n, a, b: _mse(m, a) + 0.3 * _mse(n, b),
    "sums": lambda m, n, a, b: _mse(m, a, "sum") + _mse(n, b, "sum"),
    "mean and sum": lambda m, n, a, b: _mse(m, a) + _mse(n, b, "sum"),
    "sums over lengths": _over_their_lengths,
    "joined": _joined,
    "masked": _masked,
    "consistency": _consistency,
    "adversarial": _adversarial,
    "physics": _physics,
}
OF_GRADIENTS = {"physics"}
"""What asks for the gradient of an output, which torch's fully_shard cannot give."""


def _train(models: tuple[nn.Module, nn.Module], loss: Loss | None, rank: int, of: int, swaps: bool) -> Parameters:
    """Train, with one backward for each of two losses if ``loss`` is ``None``."""
    state = nn.ModuleList(dict.fromkeys(models))
    optimizer = torch.optim.SGD(state.parameters(), lr=0.05)
    for batches in _batches(rank, of):
        first, second = reversed(batches) if swaps else batches
        optimizer.zero_grad()
        losses = [_mse(models[0], first), _mse(models[1], second)] if loss is None else [loss(*models, first, second)]
        for one in losses:
            one.backward()
        optimizer.step()
    return whole(state.state_dict())


def _trained(world: World | None, strategy: str, are_two: bool) -> dict[tuple[str, bool], Parameters]:
    def model() -> nn.Module:
        return _net() if world is None else (rw.replicate if strategy == "replicate" else rw.shard)(_net())

    def models() -> tuple[nn.Module, nn.Module]:
        first = model()
        return first, model() if are_two else first

    names = [name for name in LOSSES if strategy == "replicate" or name not in OF_GRADIENTS]
    place = (0, 1) if world is None else (world.rank, world.world_size)
    found = {(name, swaps): _train(models(), LOSSES[name], *place, swaps) for name in names for swaps in (False, True)}
    if are_two:
        found["two backwards", False] = _train(models(), None, *place, False)
    return found


@pytest.mark.parametrize("are_two", [False, True], ids=["one model", "two models"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_losses_of_several_forwards_are_exact(
    run_ranks: RunRanks, strategy: str, num_ranks: int, are_two: bool
) -> None:
    plain = _trained(None, strategy, are_two)
    for result in run_ranks(_trained, num_ranks, strategy, are_two):
        apart = {name: largest_difference(got, plain[name]) for name, got in result.get().items()}
        assert set(apart) == set(plain)
        assert {name: value for name, value in apart.items() if value > TOLERANCE} == {}


def _given(world: World) -> None:
    model = rw.replicate(_net(), weight=len)
    for a, b in _batches(world.rank, world.world_size):
        (_mse(model, a) + _mse(model, b)).backward()


def test_a_function_that_gives_some_forwards_of_a_loss_no_weight_is_an_error(run_ranks: RunRanks) -> None:
    for result in run_ranks(_given, 2):
        with pytest.raises((ConfigurationError, PeerFailed), match="samples for one of them and none for another"):
            result.get()
