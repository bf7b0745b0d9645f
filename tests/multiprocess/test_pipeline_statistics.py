# SPDX-License-Identifier: Apache-2.0
"""Statistics of the batch in a pipeline: named in the first step; exact when they are passed in the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from loss_steps import said
from losses import EXACT, labels
from staged_models import difference, drawn
from test_batch_statistics import NO_STATISTICS, SITUATIONS
from torch import nn
from torch.nn import functional

import rankwise as rw
from rankwise import testing
from rankwise.pipeline.schedule import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.world.facts import World

    OfTarget = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

WARNING = "combines the samples of a micro-batch"
OF_OUTPUTS = sorted(SITUATIONS.keys() - {"balancing loss", "mixup", "mixup by flip"})
"""Those that are computed from outputs and targets."""


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(7) for m in (nn.Linear(4, 4), nn.Tanh())], nn.Linear(4, 4)).double()


class _Given(nn.Module):
    """A model whose output is known."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, _: object) -> torch.Tensor:
        return self.output


def _of_situation(name: str) -> OfTarget:
    return lambda output, target: SITUATIONS[name][0](_Given(output), output, target, lambda x: x)


def _rmse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, target).sqrt()


def _lines(loss_fn: OfTarget, samples: int = 8, **given: Any) -> list[str]:
    with said() as lines:
        step = rw.pipeline(_model(), loss_fn, example=drawn(8, 4), **given)
        for seed in range(3):
            step(drawn(samples, 4, seed=seed), drawn(samples, 4, seed=seed + 9))
    return [line for line in lines if WARNING in line or "neither" in line]


def _warned(_: World, names: Sequence[str], mesh: dict[str, int], given: dict[str, Any]) -> dict[str, list[str]]:
    rw.mesh(**mesh)
    found = {name: _lines(_of_situation(name), **given) for name in names}
    return found | {"rmse": _lines(_rmse, **given)}


def _check_named(num_ranks: int, names: Sequence[str], last: int, **given: Any) -> None:
    mesh = given.pop("mesh", {"pp": num_ranks})
    for rank, result in enumerate(testing.run_ranks(_warned, num_ranks, names, mesh, given)):
        for name, lines in result.get().items():
            assert len(lines) == (rank == last), name
            place = "Sqrt" if name == "rmse" else f"{SITUATIONS[name][1]} at test_batch_statistics.py:"
            assert all(place in line for line in lines), (name, lines)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_statistic_of_a_micro_batch_is_named_once_with_its_line(schedule: str) -> None:
    last = 0 if schedule == "zbv_zero_bubble" else 1
    _check_named(2, ["class weights of the batch"], last, schedule=schedule, micro_batches=4)


@pytest.mark.parametrize(("num_ranks", "micro_batches"), [(1, 3), (3, 8)])
def test_a_statistic_is_named_on_any_number_of_stages_and_with_single_samples(
    num_ranks: int, micro_batches: int
) -> None:
    _check_named(num_ranks, OF_OUTPUTS, num_ranks - 1, micro_batches=micro_batches)


class _Balancing(nn.Module):
    """Mixes experts, and returns the loss that balances them."""

    def __init__(self, *, is_exact: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.is_exact = is_exact

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities = self.gate(x).softmax(-1)
        mixed = torch.stack([expert(x) for expert in self.experts], 1).mul(probabilities[..., None]).sum(1)
        if self.is_exact:
            return x + mixed, probabilities.square().mean()
        return x + mixed, probabilities.mean(0).square().sum()


class _Mixture(nn.Module):
    """Balances in an early stage."""

    def __init__(self, *, is_exact: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = _Balancing(is_exact=is_exact)
        self.rest = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h, balance = self.experts(x)
        for layer in self.rest:
            h = torch.tanh(layer(h))
        return h, balance


def _balanced(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output[0], target) + 0.5 * output[1]


def _mixed(_: World, is_exact: bool, micro_batches: int) -> tuple[float, list[str]]:
    rw.mesh(pp=-1)
    model, plain = (_Mixture(is_exact=is_exact).double() for _ in range(2))
    x, y = drawn(8, 4), drawn(8, 4, seed=2)
    with said() as lines:
        step = rw.pipeline(model, _balanced, example=x, micro_batches=micro_batches)
        step(x, y)
    _balanced(plain(x), y).backward()
    return difference(model, plain), [line for line in lines if WARNING in line]


@pytest.mark.parametrize("micro_batches", [4, 8])
def test_a_statistic_of_an_early_stage_is_named(micro_batches: int) -> None:
    for rank, result in enumerate(testing.run_ranks(_mixed, 2, False, micro_batches)):
        off, lines = result.get()
        assert (off > 1e-6) == (rank == 0)  # the rank that has the experts
        assert len(lines) == (rank == 1)
        assert all("mean at test_pipeline_statistics.py:" in line for line in lines)


@pytest.mark.parametrize(("is_exact", "micro_batches"), [(True, 4), (True, 8), (False, 1)])
def test_a_mean_of_an_early_stage_and_one_micro_batch_are_exact(is_exact: bool, micro_batches: int) -> None:
    for result in testing.run_ranks(_mixed, 2, is_exact, micro_batches):
        off, lines = result.get()
        assert off < 1e-12
        assert lines == []


def _weighted(output: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    classes, weights = target
    losses = functional.cross_entropy(output, classes, reduction="none") * weights
    return losses.sum() / weights.sum()


def _advised(_: World) -> tuple[float, list[str]]:
    """Pass the weights of the classes in the target, as the warning says."""
    rw.mesh(pp=-1)
    model, plain = _model(), _model()
    x, classes = drawn(11, 4), labels(drawn(11, 4, seed=3))
    counts = torch.bincount(classes, minlength=4)
    weights = 1.0 / counts.clamp_min(1).double()
    with said() as lines:
        step = rw.pipeline(model, _weighted, example=x, micro_batches=4)
        loss = step(x, (classes, weights[classes]))
    expected = functional.cross_entropy(plain(x), classes, weight=weights)
    expected.backward()
    off = max(difference(model, plain), abs(float(loss - expected)))
    return off, [line for line in lines if WARNING in line or "neither" in line]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_statistics_in_the_target_are_exact(num_ranks: int) -> None:
    for result in testing.run_ranks(_advised, num_ranks):
        off, lines = result.get()
        assert off < 1e-12
        assert lines == []


def _unwarned(_: World, micro_batches: int) -> dict[str, list[str]]:
    losses = EXACT | NO_STATISTICS
    rw.mesh(pp=-1)
    if micro_batches == 1:
        return {name: _lines(_of_situation(name), micro_batches=1) for name in OF_OUTPUTS}
    found = {}
    for name, loss in losses.items():
        of_target: OfTarget = lambda o, t, loss=loss: loss(o, t, o.detach())  # type: ignore[misc]  # noqa: E731
        found[name] = [line for line in _lines(of_target, micro_batches=micro_batches) if WARNING in line]
    return found


@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_nothing_is_said_of_losses_that_are_exact(micro_batches: int) -> None:
    for result in testing.run_ranks(_unwarned, 2, micro_batches):
        assert {name: lines for name, lines in result.get().items() if lines} == {}
