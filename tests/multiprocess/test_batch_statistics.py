# SPDX-License-Identifier: Apache-2.0
"""Statistics of a rank's samples that a loss depends on: named in the first step; exact when taken as advised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from loss_steps import STEPS, plain_model, said
from losses import CLASS_WEIGHTS, EXACT, labels
from replicas import TOLERANCE, Parameters, largest_difference
from torch import nn
from torch.nn import functional

import rankwise as rw
from rankwise import testing
from rankwise.comm.session import current_or_none

if TYPE_CHECKING:
    from collections.abc import Callable

    from losses import Loss

    from rankwise.world.facts import World

    Everything = Callable[[torch.Tensor], torch.Tensor]
    """Returns the samples of all ranks."""
    Situation = Callable[[nn.Module, torch.Tensor, torch.Tensor, Everything], torch.Tensor]
    """Returns a loss of a model, inputs [batch, 3], targets [batch, 4], and the means to see all samples."""

GLOBAL_BATCH = 7
WARNING = "combines the samples of this rank"


class _Experts(nn.Module):
    """Returns the outputs of experts and the loss that balances them."""

    def __init__(self, everything: Everything) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(3, 3).double()
        self.experts = nn.ModuleList([nn.Linear(3, 4).double() for _ in range(3)])
        self.everything = everything

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities = self.gate(x).softmax(-1)
        weights, chosen = probabilities.max(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)[torch.arange(len(x)), chosen]
        counts = functional.one_hot(self.everything(chosen), 3).to(probabilities).mean(0)
        return outputs * weights[:, None], 3 * (counts * probabilities.mean(0)).sum()


def _balanced(model: nn.Module, x: torch.Tensor, y: torch.Tensor, everything: Everything) -> torch.Tensor:
    del everything
    outputs, balance = model(x)
    return functional.mse_loss(outputs, y) + 0.5 * balance


def _advantages(model: nn.Module, x: torch.Tensor, y: torch.Tensor, everything: Everything) -> torch.Tensor:
    rewards = everything(y[:, 0])
    advantages = (y[:, 0] - rewards.mean()) / (rewards.std() + 1e-8)
    return -(model(x).log_softmax(1)[:, 0] * advantages).mean()


def _scores(model: nn.Module, x: torch.Tensor, y: torch.Tensor, everything: Everything) -> torch.Tensor:
    return functional.mse_loss(model(x), (y - everything(y).mean(0)) / everything(y).std(0))


def _relative_targets(model: nn.Module, x: torch.Tensor, y: torch.Tensor, everything: Everything) -> torch.Tensor:
    return functional.mse_loss(model(x), y / everything(y).abs().mean())


def _class_weights(model: nn.Module, x: torch.Tensor, y: torch.Tensor, everything: Everything) -> torch.Tensor:
    counts = torch.bincount(everything(labels(y)), minlength=4)
    return functional.cross_entropy(model(x), labels(y), weight=1.0 / counts.clamp_min(1).double())


def _counted_by_one_hot(model: nn.Module, x: torch.Tensor, y: torch.Tensor, everything: Everything) -> torch.Tensor:
    counts = functional.one_hot(everything(labels(y)), 4).sum(0)
    return functional.cross_entropy(model(x), labels(y), weight=1.0 / counts.clamp_min(1).double())


def _adaptive_weights(model: nn.Module, x: torch.Tensor, y: torch.Tensor, everything: Everything) -> torch.Tensor:
    outputs = model(x)
    parts = [functional.mse_loss(outputs, y, reduction="none").mean(1), (outputs - y).abs().mean(1)]
    weights = torch.stack([everything(one.detach()).mean() for one in parts]).softmax(0)
    return weights[0] * parts[0].mean() + weights[1] * parts[1].mean()


def _trimmed(model: nn.Module, x: torch.Tensor, y: torch.Tensor, everything: Everything) -> torch.Tensor:
    losses = functional.mse_loss(model(x), y, reduction="none").mean(1)
    limit = everything(losses.detach()).quantile(0.5)
    kept = losses <= limit
    return (losses * kept).sum() / kept.sum()


def _is_own(x: torch.Tensor, everything: Everything) -> torch.Tensor:
    """Return which of all samples are this rank's."""
    session = current_or_none()
    rank = 0 if session is None else session.world.rank
    return everything(torch.full((len(x),), rank)) == rank


def _mixup(model: nn.Module, x: torch.Tensor, y: torch.Tensor, everything: Everything) -> torch.Tensor:
    own = _is_own(x, everything)
    order = torch.randperm(len(own), generator=torch.Generator().manual_seed(3))
    other_x, other_y = (everything(one)[order][own] for one in (x, y))
    return functional.mse_loss(model(0.7 * x + 0.3 * other_x), 0.7 * y + 0.3 * other_y)


def _flipped(model: nn.Module, x: torch.Tensor, y: torch.Tensor, everything: Everything) -> torch.Tensor:
    return functional.mse_loss(model(0.7 * x + 0.3 * everything(x).flip(0)[_is_own(x, everything)]), y)


def _class_centers(model: nn.Module, x: torch.Tensor, y: torch.Tensor, everything: Everything) -> torch.Tensor:
    outputs, kinds = model(x), labels(y)
    every_output, every_kind = everything(outputs.detach()), everything(kinds)
    centers = torch.stack([every_output[every_kind == kind].mean(0).nan_to_num() for kind in range(4)])
    return (outputs - centers[kinds]).square().sum(1).mean()


SITUATIONS: dict[str, tuple[Situation, str]] = {
    "balancing loss": (_balanced, "mean"),
    "normalized advantages": (_advantages, "mean"),
    "z-scored targets": (_scores, "mean"),
    "targets relative to their mean": (_relative_targets, "mean"),
    "class weights of the batch": (_class_weights, "bincount"),
    "class weights by one_hot": (_counted_by_one_hot, "sum"),
    "adaptive weights": (_adaptive_weights, "mean"),
    "trimmed mean": (_trimmed, "sort"),
    "centers of classes": (_class_centers, "mean"),
    "mixup": (_mixup, "index"),
    "mixup by flip": (_flipped, "flip"),
}


def _logged(o: torch.Tensor, t: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(o, labels(t))
    accuracy = (o.argmax(1) == labels(t)).double().mean()
    hardest, spread = loss.detach().sqrt(), o.detach().std(0)
    assert float(accuracy) <= 1.0
    assert (hardest.dim(), spread.dim()) == (0, 1)
    return loss


NO_STATISTICS: dict[str, Loss] = {
    "logged": _logged,
    "of the loss itself": lambda o, t, _: functional.mse_loss(o, t) / functional.mse_loss(o, t).detach(),
    "layer norm": lambda o, t, _: functional.mse_loss(functional.layer_norm(o, [4]), t),
    "soft labels": lambda o, t, _: functional.kl_div(o.log_softmax(1), t.softmax(1), reduction="sum") / len(o),
    "dot": lambda o, t, _: torch.dot(o[:, 0], t[:, 0]),
    "einsum": lambda o, t, _: torch.einsum("bi,bi->", o, t),
    "a constant's statistics": lambda o, t, _: functional.mse_loss(o, t) * CLASS_WEIGHTS.softmax(0).std(),
    "chosen by labels": lambda o, t, _: (CLASS_WEIGHTS[labels(t)] * o[torch.arange(len(o)), labels(t)]).mean(),
    "sorted features": lambda o, t, _: (o.sort(1).values - t.cumsum(1)).abs().mean(),
    "margin": lambda o, t, _: (o - o.gather(1, labels(t)[:, None]) + 1).clamp(min=0).mean(),
}
"""Losses that depend on statistics of single samples only, or of none."""


def _data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 3, generator=generator, dtype=torch.float64)
    return list(zip(x, torch.randn(24, 4, generator=generator, dtype=torch.float64), strict=True))


def _train(loss_of: Situation, everything: Everything, *, has_ranks: bool) -> Parameters:
    model: nn.Module = _Experts(everything) if loss_of is _balanced else plain_model()
    model = rw.replicate(model) if has_ranks else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in rw.DataLoader(_data(), global_batch_size=GLOBAL_BATCH):
        optimizer.zero_grad()
        loss_of(model, x, y, everything).backward()
        optimizer.step()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def _own(x: torch.Tensor) -> torch.Tensor:
    return x


def _lines(loss_of: Situation, everything: Everything) -> tuple[Parameters, list[str]]:
    with said() as lines:
        trained = _train(loss_of, everything, has_ranks=True)
    return trained, lines


def _warned(world: World) -> dict[str, list[str]]:
    del world
    return {name: _lines(loss_of, _own)[1] for name, (loss_of, _) in SITUATIONS.items()}


def _uncertain(model: nn.Module, x: torch.Tensor, y: torch.Tensor, _: Everything) -> torch.Tensor:
    outputs, parameters = model(x), list(model.parameters())
    one, other = parameters[0].sum(), parameters[-1].sum()
    losses = [functional.mse_loss(outputs, y), EXACT["class_weights"](outputs, y, x)]
    return (-one).exp() * losses[0] + one + losses[1] / (2 * other**2) + other.square().log()


EVERY_EXACT: dict[str, Situation] = {
    **{name: lambda model, x, y, _, loss=loss: loss(model(x), y, x) for name, loss in (EXACT | NO_STATISTICS).items()},
    "uncertainty weights": _uncertain,
}


def _trained(world: World) -> dict[str, tuple[Parameters, list[str]]]:
    losses = EVERY_EXACT.items()
    if world.world_size == 1:
        return {name: (_train(loss_of, _own, has_ranks=False), []) for name, loss_of in losses}
    return {name: _lines(loss_of, _own) for name, loss_of in losses}


def test_nothing_is_said_of_losses_that_are_exact() -> None:
    (plain,) = testing.run_ranks(_trained, 1)
    for result in testing.run_ranks(_trained, 2):
        for name, (trained, lines) in result.get().items():
            assert largest_difference(trained, plain.get()[name][0]) < TOLERANCE, name
            assert [line for line in lines if WARNING in line or "neither" in line] == [], name


def _loops(world: World) -> dict[str, list[str]]:
    del world
    found: dict[str, list[str]] = {}
    for name, step in STEPS.items():
        model = rw.replicate(plain_model())
        with said() as found[name]:
            for x, y in rw.DataLoader(_data(), global_batch_size=GLOBAL_BATCH):
                step(model, x, y)
    return found


def test_no_statistic_is_named_in_loops_that_are_exact() -> None:
    for result in testing.run_ranks(_loops, 2):
        assert {name: lines for name, lines in result.get().items() if any(WARNING in one for one in lines)} == {}


def _one_rank(world: World) -> tuple[dict[str, Parameters], list[str]]:
    del world
    with said() as lines:
        return {name: _train(loss_of, _own, has_ranks=False) for name, (loss_of, _) in SITUATIONS.items()}, lines


def _advised(world: World) -> dict[str, tuple[Parameters, list[str]]]:
    del world
    return {name: _lines(loss_of, rw.whole_batch) for name, (loss_of, _) in SITUATIONS.items()}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_statistics_of_the_whole_batch_are_exact(num_ranks: int) -> None:
    plain, _ = testing.run_ranks(_one_rank, 1)[0].get()
    for result in testing.run_ranks(_advised, num_ranks):
        for name, (trained, lines) in result.get().items():
            assert largest_difference(trained, plain[name]) < TOLERANCE, name
            assert [line for line in lines if "warning" in line or WARNING in line or "neither" in line] == [], name


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_statistic_of_the_batch_is_named_once_with_its_line(num_ranks: int) -> None:
    for rank, result in enumerate(testing.run_ranks(_warned, num_ranks)):
        for name, told in result.get().items():
            lines = [line for line in told if WARNING in line]  # some losses of a single sample are NaN
            assert len(lines) == (rank == 0), name
            assert all(f"{SITUATIONS[name][1]} at test_batch_statistics.py:" in line for line in lines), (name, lines)
