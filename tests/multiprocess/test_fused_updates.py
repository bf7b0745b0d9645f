# SPDX-License-Identifier: Apache-2.0
"""Updates of one copy per host by torch's fused kernels: where they are taken, and that they train as one rank does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from on_ranks import one_rank
from replicas import TOLERANCE, Net, batches, built, largest_difference, part
from torch import nn

import rankwise as rw
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World

SIZES = (12, 7, 2, 12, 5, 9, 4, 11)
KERNELS = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_")
ALL_BUT_FIRST = len(SIZES) - 1
Result = dict[str, torch.Tensor]
Change = "Callable[[torch.optim.Optimizer, int], object]"


def _train(world: World, make: Callable[[Any], torch.optim.Optimizer], change: Change | None = None) -> Result:
    """Return the parameters and the optimizer's state after some steps, and how many updates were fused."""
    model = rw.replicate(built(Net), one_copy_per_host=True)
    optimizer = make(model.parameters())
    ways = [(group["foreach"], group["fused"]) for group in optimizer.param_groups]
    num_fused = 0
    for step, batch in enumerate(batches(SIZES)):
        x, y = (part(one, world.rank, world.world_size) for one in batch)
        nn.functional.mse_loss(model(x), y).backward()
        if change is not None:
            change(optimizer, step)
        with mock.patch.multiple(torch, **{name: mock.Mock(wraps=getattr(torch, name)) for name in KERNELS}):
            optimizer.step()
            num_fused += any(getattr(torch, name).called for name in KERNELS)
        assert [(group["foreach"], group["fused"]) for group in optimizer.param_groups] == ways
        optimizer.zero_grad()
    found = {name: one.clone() for name, one in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": v.double() for key, v in state.items() if isinstance(v, torch.Tensor)}
    return {**found, "fused": torch.tensor(float(num_fused))}


def _check(make: Callable[[Any], torch.optim.Optimizer], change: Change | None, num_fused: int) -> None:
    """Check that two ranks train as one does, and how many of their updates are fused."""
    reference = one_rank(_train, make, change)
    assert reference.pop("fused") == 0
    for result in run_ranks(_train, 2, make, change):
        found = result.get()
        assert found.pop("fused") == num_fused
        assert largest_difference(found, reference) < TOLERANCE


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05, amsgrad=True, weight_decay=0.1)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


@pytest.mark.parametrize(
    ("make", "num_fused"), [(_sgd, len(SIZES)), *((one, ALL_BUT_FIRST) for one in (_momentum, _adam, _adamw))]
)
def test_updates_are_fused_and_exact_once_there_is_a_state(
    make: Callable[[Any], torch.optim.Optimizer], num_fused: int
) -> None:
    _check(make, None, num_fused)


def _chosen(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, foreach=True)


def _learned(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.05))


@pytest.mark.parametrize("make", [_chosen, _learned])
def test_a_way_that_the_script_has_chosen_stays(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    _check(make, None, 0)


def _transpose_gradients(optimizer: torch.optim.Optimizer, step: int) -> None:
    if step in {3, 5}:
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is not None and parameter.ndim > 1:
                parameter.grad = parameter.grad.t().contiguous().t()


def _transpose_state(optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 4:
        for state in optimizer.state.values():
            if state["exp_avg"].ndim > 1:
                state["exp_avg"] = state["exp_avg"].t().contiguous().t()


def _forget_momentum(optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 4:
        optimizer.state[optimizer.param_groups[0]["params"][0]].clear()


def _begin_momentum(optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.param_groups[0]["momentum"] = 0.9 if step >= 4 else 0.0
    optimizer.param_groups[0]["nesterov"] = step >= 4


@pytest.mark.parametrize(
    ("make", "change", "num_fused"),
    [
        (_adamw, _transpose_gradients, ALL_BUT_FIRST - 2),
        (_adamw, _transpose_state, ALL_BUT_FIRST - 1),
        (_momentum, _forget_momentum, ALL_BUT_FIRST - 1),
        (_momentum, _begin_momentum, ALL_BUT_FIRST),
    ],
)
def test_what_the_kernels_cannot_take_is_updated_by_the_loop(
    make: Callable[[Any], torch.optim.Optimizer], change: Change, num_fused: int
) -> None:
    _check(make, change, num_fused)


def _with_a_parameter_of_its_own(world: World) -> Result:
    """Train with one group for a shared model and a parameter that each rank has for itself."""
    model = rw.replicate(built(Net), one_copy_per_host=True)
    own = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torch.optim.AdamW([*model.parameters(), own], lr=0.05)
    optimizer.state["epoch"] = 3
    num_fused = 0
    for step, batch in enumerate(batches(SIZES)):
        x, y = (part(one, world.rank, world.world_size) for one in batch)
        nn.functional.mse_loss(model(x), y).backward()
        own.grad = torch.ones_like(own) if step % 2 else None
        with mock.patch.object(torch, "_fused_adamw_", wraps=torch._fused_adamw_) as kernel:
            optimizer.step()
            num_fused += kernel.called
        optimizer.zero_grad()
    return {**{name: one.clone() for name, one in model.state_dict().items()}, "fused": torch.tensor(float(num_fused))}


def test_a_group_with_parameters_of_one_rank_alone_is_updated_by_the_loop() -> None:
    reference = one_rank(_with_a_parameter_of_its_own)
    for result in run_ranks(_with_a_parameter_of_its_own, 2):
        found = result.get()
        assert found["fused"] == 0
        assert largest_difference(found, reference) < TOLERANCE


def _in_bfloat16(_world: World) -> tuple[Result, Result]:
    """Return parameters after steps with large gradients, by one copy per host and by a loop."""
    torch.manual_seed(0)
    shared, alone = (nn.Linear(64, 64).bfloat16() for _ in range(2))
    alone.load_state_dict(shared.state_dict())
    rw.replicate(shared, one_copy_per_host=True)
    rw.independent(alone)
    for model in (shared, alone):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(4):
            model(torch.ones(2, 64, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return shared.state_dict(), alone.state_dict()


def test_half_precision_is_updated_by_the_loop() -> None:
    for result in run_ranks(_in_bfloat16, 2):
        shared, alone = result.get()
        assert all(shared[name].equal(alone[name]) for name in alone)
        assert largest_difference(shared, _untrained()) > 0.01


def _untrained() -> Result:
    torch.manual_seed(0)
    return nn.Linear(64, 64).bfloat16().state_dict()
