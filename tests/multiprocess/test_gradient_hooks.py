# SPDX-License-Identifier: Apache-2.0
"""The script's hooks on gradients see the mean over all samples, or a warning says that they do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
import torch
from replicas import TOLERANCE, largest_difference
from said import check_said, listening
from torch import nn
from torch.nn import functional
from training_loops import dataset, parameters_of
from training_loops import network as any_network

import rankwise as rw
from rankwise import testing
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from on_ranks import RunRanks
    from replicas import Parameters

    from rankwise.world.facts import World

    Register = Callable[[nn.Module], object]
    Hook = Callable[[torch.Tensor], torch.Tensor]


def network() -> nn.Sequential:
    return cast("nn.Sequential", any_network())


def _on_all(hook: Hook) -> Register:
    return lambda model: [parameter.register_hook(hook) for parameter in model.parameters()]


def _to_norm(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * (0.05 / gradient.norm()).clamp(max=1)


def _in_order(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
        parameter.register_hook(lambda gradient: gradient - 0.01)


class _Once:
    """A hook that removes itself in its second call."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.num_calls = 0
        self.handle = parameter.register_hook(self)

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls == 2:
            self.handle.remove()
        return gradient.sign() * 0.1


def _removed(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(min=0))
        _Once(parameter)


def _clipped_after(model: nn.Module) -> None:
    def clip(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        nn.utils.clip_grad_value_([parameter], 0.05)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clip)


def _stepped_after(model: nn.Module) -> None:
    """An optimizer per parameter, stepped in backward."""
    optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {
        parameter: torch.optim.Adam([parameter], lr=0.01) for parameter in model.parameters()
    }

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


HOOKS: dict[str, Register] = {
    "clamp": _on_all(lambda gradient: gradient.clamp(-0.05, 0.05)),
    "own norm": _on_all(_to_norm),
    "sign": _on_all(torch.sign),
    "mask": _on_all(
        lambda gradient: gradient * (torch.arange(len(gradient)) % 2).view(-1, *[1] * (gradient.dim() - 1))
    ),
    "two": _in_order,
    "removed": _removed,
    "after accumulation": _clipped_after,
    "an optimizer in backward": _stepped_after,
}
LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": functional.mse_loss,
    "sum": lambda output, y: functional.mse_loss(output, y, reduction="sum") / 7.5,
    "terms": lambda output, y: functional.mse_loss(output, y) + 0.1 * (output**2).sum(),
}


def _train(register: Register, loss: str, rank: int, of: int, *, spread: bool, when: str) -> Parameters:
    model = network()
    if when == "before":
        register(model)
    if spread:
        rw.replicate(model)
    if when != "before":
        register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = dataset().tensors
    # On three ranks the last batch leaves none for one of them.
    for step, part in enumerate((slice(0, 8), slice(8, 15), slice(15, 21), slice(21, 23))):
        if when == "always cleared" or (when != "never cleared" and step != 2):
            optimizer.zero_grad()
        own_x, own_y = (one[part].tensor_split(of)[rank] for one in (x, y))
        LOSSES[loss](model(own_x), own_y).backward()
        optimizer.step()
    return parameters_of(model)


def _on_ranks(world: World, name: str, loss: str, when: str) -> Parameters:
    return _train(HOOKS[name], loss, world.rank, world.world_size, spread=True, when=when)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_parameters_are_exact(run_ranks: RunRanks, num_ranks: int, name: str) -> None:
    plain = _train(HOOKS[name], "mean", 0, 1, spread=False, when="after")
    for result in run_ranks(_on_ranks, num_ranks, name, "mean", "after"):
        assert largest_difference(result.get(), plain) <= TOLERANCE


@pytest.mark.parametrize("when", ["before", "never cleared"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["two", "after accumulation"])
def test_hooks_of_any_loss_are_exact(run_ranks: RunRanks, name: str, loss: str, when: str) -> None:
    plain = _train(HOOKS[name], loss, 0, 1, spread=False, when=when)
    for result in run_ranks(_on_ranks, 3, name, loss, when):
        assert largest_difference(result.get(), plain) <= TOLERANCE


# -- sharded -------------------------------------------------------------------------------------------


def _sharded(world: World, name: str) -> Parameters:
    x, y = dataset().tensors
    model = rw.shard(network())
    HOOKS[name](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for part in (slice(0, 8), slice(8, 15), slice(15, 21), slice(21, 23)):
        optimizer.zero_grad()
        own_x, own_y = (one[part].tensor_split(world.world_size)[world.rank] for one in (x, y))
        functional.mse_loss(model(own_x), own_y).backward()
        optimizer.step()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", ["clamp", "own norm", "two", "after accumulation", "an optimizer in backward"])
def test_hooks_of_sharded_parameters_are_exact(num_ranks: int, name: str) -> None:
    plain = _train(HOOKS[name], "mean", 0, 1, spread=False, when="always cleared")
    for result in testing.run_ranks(_sharded, num_ranks, name):
        assert largest_difference(result.get(), plain) <= TOLERANCE


def _hooked_before(_: World) -> None:
    model = network()
    HOOKS["clamp"](model[2])
    rw.shard(model)


def test_hooks_that_shard_would_lose_are_an_error() -> None:
    for result in testing.run_ranks(_hooked_before, 2):
        assert isinstance(result.error, ConfigurationError)
        assert "Parameter 2.weight has a hook" in str(result.error)


# -- autograd.grad -------------------------------------------------------------------------------------


def _grad(_: World) -> tuple[float, float]:
    model = rw.replicate(nn.Linear(1, 1, bias=False).double())
    model.weight.register_hook(lambda gradient: gradient.clamp(max=0.5))
    x = torch.full((2, 1), 3.0, dtype=torch.float64)
    (own,) = torch.autograd.grad(model(x).mean(), model.weight)
    model(x).mean().backward()
    assert model.weight.grad is not None
    return own.item(), model.weight.grad.item()


def test_autograd_grad_returns_what_hooks_make_of_it(run_ranks: RunRanks) -> None:
    assert [result.get() for result in run_ranks(_grad, 2)] == [(0.5, 0.5)] * 2


# -- what is said --------------------------------------------------------------------------------------


def _microsteps(world: World, name: str) -> list[str]:
    with listening() as said:
        model = rw.replicate(network())
        HOOKS[name](model[0])
        for step in range(4):
            x = torch.ones(2, 3, dtype=torch.float64) * (1 + world.rank)
            if step % 2:
                model(x).square().mean().backward()
            else:
                with rw.no_sync(model):
                    model(x).square().mean().backward()
    return [text for text in said if "a hook" in text]


@pytest.mark.parametrize(("name", "is_told"), [("clamp", True), ("after accumulation", True), ("mask", False)])
def test_hooks_in_microsteps_are_named_unless_they_are_linear(name: str, is_told: bool, run_ranks: RunRanks) -> None:
    for rank, result in enumerate(run_ranks(_microsteps, 2, name)):
        expected = "a hook on the gradient of 0.{} runs in each microstep inside rankwise.no_sync()"
        told = [expected.format("bias"), expected.format("weight")] if is_told and rank == 0 else []
        check_said(sorted(result.get()), told)


def _of_modules(world: World, name: str) -> list[str]:
    with listening() as said:
        model = rw.replicate(network())
        if name == "clamp":
            model[1].register_full_backward_hook(lambda _, inward, __: (inward[0].clamp(-1e-3, 1e-3),))
        elif name == "before":
            model[1].register_full_backward_pre_hook(lambda _, outward: (outward[0].clamp(min=0),))
        elif name == "reversed":
            model[1].register_full_backward_hook(lambda _, inward, __: (-0.3 * inward[0],))
        else:
            model[1].register_full_backward_hook(lambda _, inward, __: said.append(f"norm {inward[0].norm():.1f}"))
        for _ in range(3):
            x = torch.ones(2, 3, dtype=torch.float64) * (1 + world.rank)
            model(x).square().mean().backward()
    return [text for text in said if "backward hook" in text]


def _of_other_strategies(_: World, how: str, hook: str) -> list[str]:
    with listening() as told:
        model = network()
        if how != "shard":
            rw.mesh(pp=2)
        if how == "shard":
            rw.shard(model)
        backward = (
            (lambda x, y: functional.mse_loss(model(x), y).backward())
            if how == "shard"
            else rw.pipeline(
                model,
                functional.mse_loss,
                example=dataset().tensors[0][:8],
                micro_batches=1 if how == "pipeline of one micro-batch" else 4,
                split=["1"],
            )
        )
        if hook == "clamp":
            model[1].register_full_backward_hook(lambda _, inward, __: (inward[0].clamp(-1e-3, 1e-3),))
        else:
            model[1].register_full_backward_hook(lambda _, inward, __: (-0.3 * inward[0],))
        x, y = dataset().tensors
        backward(x[:8], y[:8])
    return [text for text in told if "backward hook" in text]


@pytest.mark.parametrize(
    ("how", "hook", "expected"),
    [
        ("shard", "clamp", "called with gradients of the mean over this rank's samples"),
        ("shard", "reversed", None),
        ("pipeline", "clamp", "called with gradients of the mean over a micro-batch's samples"),
        ("pipeline", "reversed", None),
        ("pipeline of one micro-batch", "clamp", None),
    ],
)
def test_hooks_of_modules_of_other_strategies(how: str, hook: str, expected: str | None) -> None:
    teller = 1 if how == "pipeline" else 0  # the rank that has the module's stage, or rank 0
    for rank, result in enumerate(testing.run_ranks(_of_other_strategies, 2, how, hook)):
        told = result.get()
        assert len(told) == (expected is not None and rank == teller)
        assert all(expected is not None and expected in text for text in told)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("clamp", "a backward hook of 1 changes gradients of activations other than linearly"),
        ("before", "a backward hook of 1 changes gradients of activations other than linearly"),
        ("reversed", None),
        ("looks", None),
    ],
)
def test_hooks_of_modules_are_named_unless_they_are_linear(
    run_ranks: RunRanks, name: str, expected: str | None
) -> None:
    for rank, result in enumerate(run_ranks(_of_modules, 2, name)):
        check_said(result.get(), [expected] if expected is not None and rank == 0 else [])
