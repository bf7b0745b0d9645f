# SPDX-License-Identifier: Apache-2.0
"""Losses that a script adds up in a loop, over outputs, classes or samples, and joins with `torch.stack` or `cat`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
import torch
from loss_steps import plain_model, said
from losses import labels
from replicas import TOLERANCE, Parameters, largest_difference
from torch import nn
from torch.nn import functional

import rankwise as rw
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from on_ranks import RunRanks

    from rankwise.world.facts import World

    Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _of_classes(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    each, loss = (o - t).square().mean(1), o.new_zeros(())
    for number in range(4):
        mask = labels(t) == number
        loss = loss + (each * mask).sum() / mask.sum().clamp_min(1)
    return loss


def _of_present_classes(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    loss = o.sum() * 0
    for number in labels(t).unique():
        loss = loss + (o - t)[labels(t) == number].square().mean()
    return loss


def _of_samples(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    masks = (t > -0.5).double()
    losses = [((a - b).square() * mask).sum() / mask.sum().clamp_min(1) for a, b, mask in zip(o, t, masks, strict=True)]
    return torch.stack(losses).mean() if losses else o.sum()


EXACT: dict[str, Loss] = {
    "classes": _of_classes,
    "joined by cat": lambda o, t: torch.cat(
        [functional.mse_loss(o, t).view(1), functional.l1_loss(o[t > 0], t[t > 0]).view(1)]
    ).mean(),
    "many sums": lambda o, t: torch.stack([(0.1 * (o - t)[:, i % 4]).square().sum() for i in range(20)]).sum(),
    "outputs": lambda o, t: torch.stack([functional.mse_loss(o[:, i], t[:, i]) for i in range(4)]).mean(),
}


def _train(model: nn.Module, loss: Loss, batches: object, *, is_weighted: bool = False) -> Parameters:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for x, y in batches:  # type: ignore[attr-defined]
        optimizer.zero_grad()
        with rw.weight(model, len(x)) if is_weighted else nullcontext():
            loss(model(x), y).backward()
        optimizer.step()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def _dataset() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, torch.randn(20, 4, generator=generator, dtype=torch.float64))


def _plain(loss: Loss) -> Parameters:
    return _train(plain_model(), loss, zip(*(one.split(6) for one in _dataset().tensors), strict=True))


def _on_ranks(_: World) -> dict[str, Parameters]:
    return {name: _train(rw.replicate(plain_model()), loss, _loader()) for name, loss in EXACT.items()}


def _loader() -> rw.DataLoader:
    return rw.DataLoader(_dataset(), global_batch_size=6)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_losses_of_classes_and_outputs_are_exact(run_ranks: RunRanks, num_ranks: int) -> None:
    for result in run_ranks(_on_ranks, num_ranks):
        apart = {name: largest_difference(got, _plain(EXACT[name])) for name, got in result.get().items()}
        assert {name: value for name, value in apart.items() if value > TOLERANCE} == {}


def _over_samples(_: World, is_weighted: bool) -> tuple[Parameters, list[str]]:
    with said() as lines:
        found = _train(rw.replicate(plain_model()), _of_samples, _loader(), is_weighted=is_weighted)
    return found, [line for line in lines if "terms of single samples" in line]


@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_loop_over_samples_is_their_mean_and_named_once(run_ranks: RunRanks, is_weighted: bool) -> None:
    plain = _plain(_of_samples)
    for rank, result in enumerate(run_ranks(_over_samples, 2, is_weighted)):
        found, lines = result.get()
        assert largest_difference(found, plain) <= TOLERANCE
        assert len(lines) == (rank == 0 and not is_weighted)


def _over_present_classes(_: World) -> None:
    _train(rw.replicate(plain_model()), _of_present_classes, _loader())


def test_classes_that_only_some_ranks_have_are_an_error(run_ranks: RunRanks) -> None:
    for result in run_ranks(_over_present_classes, 2):
        assert isinstance(result.error, ConfigurationError)
        assert "does not have the same terms on all ranks" in str(result.error)
        assert "(loss * mask).sum() / mask.sum().clamp_min(1)" in str(result.error)
