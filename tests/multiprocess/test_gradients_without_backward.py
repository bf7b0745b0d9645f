# SPDX-License-Identifier: Apache-2.0
"""Gradients that do not come out of ``backward()``: ranks that would part by them are named in the first step."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from replicas import TOLERANCE, largest_difference
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from training_loops import dataset, parameters_of

import rankwise as rw
from rankwise.errors import PeerFailed, PeerMissing, ReplicasDiffer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from on_ranks import RunRanks
    from replicas import Parameters

    from rankwise.world.facts import World

    Step = Callable[["Training", torch.Tensor, torch.Tensor], None]

STEPPED = "SGD has stepped Linear with gradients that are not the same on all ranks"
CHANGED = "Parameter weight of Linear is not the same on all ranks: it was changed without a backward()"


class Training:
    """A model and its optimizer: replicated, or plain."""

    def __init__(self, *, spread: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2).double()
        if spread:
            rw.replicate(self.model)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)
        self.is_spread = spread
        self.steps = 0

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.model(x), y)

    def gradients(self, x: torch.Tensor, y: torch.Tensor) -> Sequence[torch.Tensor]:
        return torch.autograd.grad(self.loss(x, y), self.parameters)

    def assign(self, gradients: Sequence[torch.Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def mean(self, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if not self.is_spread:
            return gradient
        return rw.all_reduce(gradient * len(x)) / rw.all_reduce(float(len(x)))

    def run(self, step: Step, rank: int, of: int) -> Parameters:
        for x, y in zip(dataset().tensors[0].split(8), dataset().tensors[1].split(8), strict=True):
            step(self, x.tensor_split(of)[rank], y.tensor_split(of)[rank])
            self.steps += 1
        return parameters_of(self.model)


# -- that part the ranks -------------------------------------------------------------------------------


def _grad_and_step(training: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    training.assign(training.gradients(x, y))
    training.optimizer.step()


def _closure(training: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    def closure() -> float:
        loss = training.loss(x, y)
        training.assign(torch.autograd.grad(loss, training.parameters))
        return loss.item()

    training.optimizer.step(closure)


def _second_step(training: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    """Backward in the first step only."""
    if training.steps == 0:
        training.loss(x, y).backward()
    else:
        training.assign(training.gradients(x, y))
    training.optimizer.step()


def _per_sample(training: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    given = {name: parameter.detach() for name, parameter in training.model.named_parameters()}

    def loss_of(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(functional_call(training.model, parameters, (x,)), y)

    found = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(given, x, y)
    training.assign([one.clamp(-1, 1).mean(0) for one in found.values()])
    training.optimizer.step()


def _microsteps(training: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    """The last microstep is inside no_sync() too."""
    training.optimizer.zero_grad()
    for _ in range(2):
        with rw.no_sync(training.model):
            training.loss(x, y).backward()
    training.optimizer.step()


def _through_data(training: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    for parameter, gradient in zip(training.parameters, training.gradients(x, y), strict=True):
        parameter.data -= 0.1 * gradient


def _no_grad(training: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    found = training.gradients(x, y)
    with torch.no_grad():
        for parameter, gradient in zip(training.parameters, found, strict=True):
            parameter.sub_(0.1 * gradient)


def _first_order_maml(training: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    """Adapted weights of each rank's own task; the outer gradient is not averaged."""
    adapted = copy.deepcopy(training.model)
    inner = torch.optim.SGD(adapted.parameters(), lr=0.1)
    functional.mse_loss(adapted(x), y).backward()
    inner.step()
    training.assign(torch.autograd.grad(functional.mse_loss(adapted(x), y), list(adapted.parameters())))
    training.optimizer.step()


PARTING: dict[str, tuple[Step, str, int]] = {
    "autograd.grad": (_grad_and_step, STEPPED, 0),
    "in a closure": (_closure, STEPPED, 0),
    "after a backward": (_second_step, STEPPED, 1),
    "per sample": (_per_sample, STEPPED, 0),
    "no_sync without an end": (_microsteps, STEPPED, 0),
    "first-order MAML": (_first_order_maml, STEPPED, 0),
    "through .data": (_through_data, CHANGED, 1),
    "under no_grad": (_no_grad, CHANGED, 1),
}
"""The step, the error, and after how many finished steps it comes."""


def _part(world: World, name: str) -> tuple[str, int]:
    training = Training(spread=True)
    try:
        training.run(PARTING[name][0], world.rank, world.world_size)
    except ReplicasDiffer as error:
        return str(error), training.steps
    rw.barrier()
    return "", training.steps


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", PARTING)
def test_ranks_that_would_part_are_named_in_the_first_step(run_ranks: RunRanks, num_ranks: int, name: str) -> None:
    results = run_ranks(_part, num_ranks, name)
    told = [result.get() for result in results if result.error is None]
    assert all(isinstance(one.error, PeerFailed | PeerMissing) for one in results if one.error is not None)
    _, words, steps = PARTING[name]
    assert [steps for text, steps in told if words in text] == [steps], told
    (text,) = [text for text, _ in told if text]
    assert "rank 0: " in text
    assert "call loss.backward()" in text


# -- that are the same on all ranks --------------------------------------------------------------------


def _averaged(training: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    training.assign([training.mean(one, x) for one in training.gradients(x, y)])
    training.optimizer.step()


def _averaged_in_place(training: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    found = [training.mean(one, x) for one in training.gradients(x, y)]
    with torch.no_grad():
        for parameter, gradient in zip(training.parameters, found, strict=True):
            parameter.sub_(0.1 * gradient)


def _inputs(training: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    training.optimizer.zero_grad()
    torch.autograd.backward(training.loss(x, y), inputs=training.parameters)
    training.optimizer.step()


def _surgery(training: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    """Gradients of two tasks, of which conflicting parts are taken away (PCGrad)."""
    found = []
    for column in range(2):
        training.optimizer.zero_grad()
        functional.mse_loss(training.model(x)[:, column], y[:, column]).backward()
        found.append([p.grad.clone() for p in training.parameters if p.grad is not None])
    first, second = (torch.cat([one.flatten() for one in gradients]) for gradients in found)
    share = min(float(first @ second), 0.0) / float(second @ second)
    training.assign([a - share * b + b for a, b in zip(*found, strict=True)])
    training.optimizer.step()
    training.optimizer.step()  # twice with the same gradients


def _maml(training: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    """Each sample is a task: adapted by a differentiable step, with one backward of the outer loss."""
    named = dict(training.model.named_parameters())
    losses = []
    for one, goal in zip(x, y, strict=True):
        inner = functional.mse_loss(training.model(one[None]), goal[None])
        slopes = torch.autograd.grad(inner, list(named.values()), create_graph=True)
        fast = {name: p - 0.1 * slope for (name, p), slope in zip(named.items(), slopes, strict=True)}
        losses.append(functional.mse_loss(functional_call(training.model, fast, (one[None],)), goal[None]))
    training.optimizer.zero_grad()
    loss = torch.stack(losses).sum() / len(losses)
    if training.is_spread:
        with rw.weight(training.model, len(losses)):
            loss.backward()
    else:
        loss.backward()
    training.optimizer.step()


SAME: dict[str, Step] = {
    "averaged by hand": _averaged,
    "averaged by hand, in place": _averaged_in_place,
    "backward(inputs=)": _inputs,
    "gradient surgery": _surgery,
    "MAML with an outer backward": _maml,
}


def _train(world: World, name: str) -> Parameters:
    return Training(spread=True).run(SAME[name], world.rank, world.world_size)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", SAME)
def test_gradients_that_are_averaged_are_exact(run_ranks: RunRanks, num_ranks: int, name: str) -> None:
    plain = Training(spread=False).run(SAME[name], 0, 1)
    for result in run_ranks(_train, num_ranks, name):
        assert largest_difference(result.get(), plain) <= TOLERANCE
