# SPDX-License-Identifier: Apache-2.0
"""A model that each rank trains for itself by mistake is reported in its first step; whatever is meant is not."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from said import check_said
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer

import rankwise as rw
from rankwise import testing
from rankwise.comm import optimizer_steps, step_hooks
from rankwise.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World

NUM_RANKS = 3
WORDS = "3 ranks trains its own model: SGD has stepped 2 parameters that no strategy synchronizes"
Heard = list[tuple[int, str]]


class _Wrapped(nn.Module):
    """Stands in for FullyShardedDataParallel, which takes GPUs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


_Wrapped.__name__ = "FullyShardedDataParallel"


def _model(how: str, world: World) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(2, 4 + world.rank if how == "other shapes" else 4)
    wrap: dict[str, Callable[[nn.Module], Any]] = {
        "replicate": rw.replicate,
        "shard": rw.shard,
        "a part of a replicated model": lambda one: rw.replicate(nn.Sequential(one, nn.Linear(4, 1))),
        "independent": rw.independent,
        "DDP": DistributedDataParallel,
        "FSDP": _Wrapped,
        "FSDP2": fully_shard,
    }
    return wrap.get(how, lambda one: one)(model)


def _exchange_by_hand(how: str, model: nn.Module) -> None:
    for parameter in model.parameters():
        if how == "rw.all_reduce by hand":
            parameter.grad = rw.all_reduce(parameter.grad, "mean")
        elif how == "torch's all_reduce by hand":
            dist.all_reduce(parameter.grad)


def _train(world: World, how: str) -> Heard:
    heard: Heard = []
    step = 0
    handler = logging.Handler()
    handler.emit = lambda record: heard.append((step, record.getMessage()))  # type: ignore[method-assign]
    logger.addHandler(handler)
    if how == "Horovod":
        import rankwise.compat.horovod as hvd

        hvd.init()
    model = _model(how, world)
    if how == "local_sgd":
        rw.local_sgd(model, every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if how == "lr 0" else 0.1)
    is_trained = how != "one rank" or world.rank == 0
    while step < 3 * is_trained:
        x = torch.full((2, 2), 1.0 if how == "the same samples" else 1.0 + world.rank)
        if how == "no gradient at first" and step == 0:
            optimizer.step()
            step += 1
        model(x).square().mean().backward()
        _exchange_by_hand(how, model)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    rw.barrier()
    return [(at, text) for at, text in heard if "has stepped" in text]


@pytest.mark.parametrize("how", ["alone", "lr 0", "no gradient at first"])
def test_ranks_that_train_apart_are_reported_once_in_their_first_step(how: str) -> None:
    heard = [one for result in testing.run_ranks(_train, NUM_RANKS, how) for one in result.get()]
    check_said([text for _, text in heard], [WORDS])
    assert heard[0][0] == (how == "no gradient at first")
    assert "rankwise.replicate(model)" in heard[0][1]
    assert "rankwise.independent(model)" in heard[0][1]


@pytest.mark.parametrize(
    "how",
    [
        "replicate",
        "shard",
        "a part of a replicated model",
        "local_sgd",
        "independent",
        "DDP",
        "FSDP",
        "FSDP2",
        "Horovod",
        "rw.all_reduce by hand",
        "torch's all_reduce by hand",
        "the same samples",
        "other shapes",
        "one rank",
    ],
)
def test_no_report_for(how: str) -> None:
    assert [result.get() for result in testing.run_ranks(_train, NUM_RANKS, how)] == [[], [], []]


class _CenterLoss(nn.Module):
    """A criterion with parameters of its own, as public scripts write it."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.zeros(3, 4))

    def forward(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (output - self.centers[labels]).square().sum(1).mean()


def _criterion(world: World, spread: bool) -> Heard:
    heard: Heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append((0, record.getMessage()))  # type: ignore[method-assign]
    logger.addHandler(handler)
    torch.manual_seed(0)
    model, criterion = rw.replicate(nn.Linear(2, 4)), _CenterLoss()
    if spread:
        rw.replicate(criterion)
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    for _ in range(3):
        x = torch.full((2, 2), 1.0 + world.rank)
        with rw.weight(criterion, len(x)) if spread else contextlib.nullcontext():
            criterion(model(x), torch.tensor([0, world.rank])).backward()
        optimizer.step()
        optimizer.zero_grad()
    rw.barrier()
    return [(at, text) for at, text in heard if "has stepped" in text]


def test_a_criterion_with_parameters_of_its_own_is_named_in_its_first_step() -> None:
    heard = [one for result in testing.run_ranks(_criterion, NUM_RANKS, False) for one in result.get()]
    check_said([text for _, text in heard], ["SGD has stepped 1 parameter outside the distributed model"])
    assert "(centers of _CenterLoss)" in heard[0][1]


def test_a_criterion_that_is_replicated_too_is_not() -> None:
    assert [result.get() for result in testing.run_ranks(_criterion, NUM_RANKS, True)] == [[], [], []]


def test_one_rank_is_not_followed() -> None:
    (result,) = testing.run_ranks(_hooks, 1)
    assert result.get() == (1, 0), "its steps are measured, not compared"


def test_the_hook_goes_with_the_world() -> None:
    assert [result.get() for result in testing.run_ranks(_hooks_around_leave, 2)] == [((1, 1), (0, 0))] * 2


def _hooks(_: World) -> tuple[int, int]:
    """Return how many hooks torch calls, and how many followers they call."""
    return len(torch_optimizer._global_optimizer_post_hooks), len(step_hooks._entries)


def _hooks_around_leave(world: World) -> tuple[tuple[int, int], tuple[int, int]]:
    before = _hooks(world)
    rw.leave()
    return before, _hooks(world)


def test_a_compiled_step_is_followed_too() -> None:
    assert sum(result.get() for result in testing.run_ranks(_compiled, 2)) == 1


def _compiled(world: World) -> int:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.full((2, 2), 1.0 + world.rank)).sum().backward()
    torch.compile(optimizer.step, backend="eager")()
    rw.barrier()
    return len([text for text in said if "has stepped" in text])


# -- what is said once, in the first step --------------------------------------------------------------


def _said_of(
    world: World, layers: list[nn.Module], make: Callable[..., torch.optim.Optimizer], words: str
) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    torch.manual_seed(0)
    model = rw.replicate(nn.Sequential(nn.Linear(2, 2), *layers))
    optimizer = make(model.parameters(), lr=0.1)
    x = torch.full((4, 2), 1.0 + world.rank)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return rw.mean(loss, len(x))

    for _ in range(2):
        optimizer.step(closure)
    model.eval()
    return [text for text in said if words in text]


SGD, LBFGS = torch.optim.SGD, torch.optim.LBFGS


@pytest.mark.parametrize(
    ("layers", "make", "words", "expected"),
    [
        (
            [nn.Dropout(0.5)],
            SGD,
            "dropout",
            "Sequential draws random numbers (dropout, noise) independently on each rank",
        ),
        ([nn.Dropout(0.0), nn.Dropout(0.5).eval()], SGD, "dropout", None),
        ([nn.BatchNorm1d(2)], SGD, "BatchNorm", "the BatchNorm layer '1' takes its statistics per rank"),
        ([nn.BatchNorm1d(2)] * 2, SGD, "BatchNorm", "the BatchNorm layer '1' takes its statistics per rank"),
        (
            [nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.BatchNorm1d(2)],
            SGD,
            "BatchNorm",
            "the BatchNorm layers '1' and 2 more take their statistics per rank",
        ),
        ([nn.BatchNorm1d(2).eval()], SGD, "BatchNorm", None),
        ([], LBFGS, "LBFGS", None),
        ([], SGD, "", None),
    ],
    ids=["dropout", "no dropout", "BatchNorm", "one BatchNorm twice", "BatchNorms", "frozen", "mean", "nothing"],
)
def test_causes_of_other_results_than_one_ranks_are_reported_once(
    layers: list[nn.Module], make: Callable[..., torch.optim.Optimizer], words: str, expected: str | None
) -> None:
    first, other = [result.get() for result in testing.run_ranks(_said_of, 2, layers, make, words)]
    check_said(first, [] if expected is None else [expected])
    assert other == []


def _said_of_lbfgs(world: World, of_own_loss: bool) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    model = rw.replicate(nn.Linear(2, 2))
    optimizer = LBFGS(model.parameters(), max_iter=1)
    x = torch.full((4, 2), 1.0 + world.rank)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss if of_own_loss else rw.all_reduce(loss)

    for _ in range(2):
        optimizer.step(closure)
    rw.barrier()
    return [text for text in said if "LBFGS" in text]


@pytest.mark.parametrize("of_own_loss", [True, False])
def test_a_closure_of_lbfgs_that_returns_a_ranks_own_loss_is_named(of_own_loss: bool) -> None:
    said = [text for result in testing.run_ranks(_said_of_lbfgs, 2, of_own_loss) for text in result.get()]
    check_said(said, ["decides how often LBFGS runs backward, and it differs between ranks"] if of_own_loss else [])


def test_independent_takes_a_module() -> None:
    with pytest.raises(rw.errors.ConfigurationError, match=r"takes a torch\.nn\.Module"):
        optimizer_steps.independent("model")  # type: ignore[type-var]
