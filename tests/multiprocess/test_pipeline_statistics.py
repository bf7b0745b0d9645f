# SPDX-License-Identifier: Apache-2.0
"""Statistics of the batch in a pipeline: named in the first step; exact when they are passed in the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from loss_steps import said
from losses import EXACT
from staged_models import drawn
from test_batch_statistics import NO_STATISTICS, SITUATIONS
from torch import nn
from torch.nn import functional

import rankwise as rw
from rankwise import testing
from rankwise.parallel.pipeline.schedule import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Callable

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


def _warned(_: World, mesh: dict[str, int], given: dict[str, Any]) -> dict[str, list[str]]:
    rw.mesh(**mesh)
    found = {name: _lines(_of_situation(name), **given) for name in OF_OUTPUTS}
    return found | {"rmse": _lines(_rmse, **given)}


def _check_named(num_ranks: int, mesh: dict[str, int], last: int, **given: Any) -> None:
    for rank, result in enumerate(testing.run_ranks(_warned, num_ranks, mesh, given)):
        for name, lines in result.get().items():
            assert len(lines) == (rank == last), name
            place = "Sqrt" if name == "rmse" else f"{SITUATIONS[name][1]} at test_batch_statistics.py:"
            assert all(place in line for line in lines), (name, lines)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_statistic_of_a_micro_batch_is_named_once_with_its_line(schedule: str) -> None:
    _check_named(2, {"pp": 2}, 0 if schedule == "zbv_zero_bubble" else 1, schedule=schedule, micro_batches=4)


@pytest.mark.parametrize(("num_ranks", "micro_batches"), [(1, 3), (3, 3), (3, 8)])
def test_a_statistic_is_named_on_any_number_of_stages_and_with_single_samples(
    num_ranks: int, micro_batches: int
) -> None:
    _check_named(num_ranks, {"pp": num_ranks}, num_ranks - 1, micro_batches=micro_batches)


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
