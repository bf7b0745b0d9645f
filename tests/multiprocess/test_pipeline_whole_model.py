# SPDX-License-Identifier: Apache-2.0
"""What a script does with all gradients of a pipeline, or of a split model, gives what one device gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from loss_steps import whole
from replicas import TOLERANCE, largest_difference
from staged_models import drawn
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import rankwise as rw
from rankwise import testing
from rankwise.errors import ConfigurationError
from rankwise.pipeline.schedule import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Callable

    from replicas import Parameters

    from rankwise.world.facts import World

    Backward = Callable[[torch.Tensor, torch.Tensor], Any]
    Loop = Callable[[nn.Module, list[torch.Tensor], Backward, torch.amp.GradScaler, bool], float]
    """Trains on one batch, and returns a number that every rank is to know."""

BATCHES = [(7, 1), (6, 2), (2, 3), (8, 4)]
"""Samples and seeds: in micro-batches of unequal and equal size, and in fewer."""


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        *[m for _ in range(5) for m in (nn.Linear(4, 4), nn.Tanh())], nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)
    ).double()


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [one.grad for one in model.parameters() if one.grad is not None]


def _clipped(norm_type: float) -> Loop:
    def loop(
        model: nn.Module, batch: list[torch.Tensor], backward: Backward, _: torch.amp.GradScaler, __: bool
    ) -> float:
        backward(*batch)
        return float(whole({"": clip_grad_norm_(model.parameters(), 0.1, norm_type=norm_type)})[""])

    return loop


def _by_value(
    model: nn.Module, batch: list[torch.Tensor], backward: Backward, _: torch.amp.GradScaler, __: bool
) -> float:
    backward(*batch)
    nn.utils.clip_grad_value_(model.parameters(), 0.02)
    return 0.0


def _logged(
    model: nn.Module, batch: list[torch.Tensor], backward: Backward, _: torch.amp.GradScaler, __: bool
) -> float:
    backward(*batch)
    return float(whole({"": nn.utils.get_total_norm(_gradients(model))})[""])


def _part(model: nn.Module, batch: list[torch.Tensor], backward: Backward, _: torch.amp.GradScaler, __: bool) -> float:
    """Clips a layer that one stage has."""
    backward(*batch)
    return float(whole({"": clip_grad_norm_(model.get_submodule("0").parameters(), 0.1)})[""])


def _with_another(
    model: nn.Module, batch: list[torch.Tensor], backward: Backward, _: torch.amp.GradScaler, __: bool
) -> float:
    """Clips the model with a parameter that every rank has."""
    another = nn.Parameter(torch.ones(2, dtype=torch.float64))
    backward(*batch)
    another.grad = torch.tensor([0.3, 0.4], dtype=torch.float64)
    return float(clip_grad_norm_([*model.parameters(), another], 0.1))


def _part_with_another(
    model: nn.Module, batch: list[torch.Tensor], backward: Backward, _: torch.amp.GradScaler, __: bool
) -> float:
    """Clips a layer that one stage has with a parameter that every rank has, and that parameter alone."""
    another = nn.Parameter(torch.ones(2, dtype=torch.float64))
    backward(*batch)
    another.grad = torch.tensor([0.3, 0.4], dtype=torch.float64)
    norm = clip_grad_norm_([*model.get_submodule("0").parameters(), another], 0.1)
    return float(norm) + float(clip_grad_norm_([another], 0.01)) + float(another.grad.sum())


def _scaled(
    model: nn.Module,
    batch: list[torch.Tensor],
    backward: Backward,
    scaler: torch.amp.GradScaler,
    overflows: bool,
) -> float:
    optimizer = torch.optim.SGD([one for one in model.parameters() if not one.is_meta], lr=0.1)
    backward(*batch)
    if overflows and (found := model.get_submodule("0").get_parameter("bias").grad) is not None:
        found.add_(torch.inf)
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


LOOPS: dict[str, Loop] = {
    "norm": _clipped(2.0),
    "largest": _clipped(float("inf")),
    "third": _clipped(3.0),
    "value": _by_value,
    "logged": _logged,
    "part": _part,
    "with another": _with_another,
    "part with another": _part_with_another,
    "scaler": _scaled,
}


def _clamp(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-0.02, 0.02)


def _to_norm(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * (0.05 / gradient.norm()).clamp(max=1)


def _clip_after(parameter: torch.Tensor) -> None:
    nn.utils.clip_grad_value_([parameter], 0.02)


def _register(model: nn.Module, hook: str) -> None:
    for one in model.parameters():
        if hook == "after":
            one.register_post_accumulate_grad_hook(_clip_after)
        elif hook != "none":
            one.register_hook(_clamp if hook == "clamp" else _to_norm)


def _train(how: str, loop: str, hook: str, schedule: str) -> tuple[Parameters, list[float]]:
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=loop == "scaler")

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return scaler.scale(functional.mse_loss(output, target))

    if schedule == "hooked before":
        _register(model, hook)
    backward: Backward = lambda x, y: loss_fn(model(x), y).backward()  # noqa: E731
    if how == "pipeline":
        name = schedule if schedule in SCHEDULES else "1f1b"
        backward = rw.pipeline(model, loss_fn, example=drawn(8, 4), micro_batches=4, schedule=name)
    elif how == "tensor_parallel":
        rw.tensor_parallel(model)
    if schedule != "hooked before":
        _register(model, hook)
    numbers = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (samples, seed) in enumerate(BATCHES):
        if number != 2:
            optimizer.zero_grad()
        batch = [drawn(samples, 4, seed=seed), drawn(samples, 4, seed=seed + 10)]
        numbers.append(LOOPS[loop](model, batch, backward, scaler, number == 1))
        if loop != "scaler":
            optimizer.step()
    return whole({name: one for name, one in model.named_parameters() if not one.is_meta}), numbers


def _on_ranks(world: World, how: str, loop: str, hook: str, schedule: str) -> tuple[Parameters, list[float]]:
    if how == "pipeline":
        copies = 2 if world.world_size == 4 else 1
        rw.mesh(pp=world.world_size // copies, dp_replicate=copies)
    else:
        rw.mesh(tp=-1)
    return _train(how, loop, hook, schedule)


def _check(num_ranks: int, how: str, loop: str, hook: str = "none", schedule: str = "1f1b") -> None:
    expected, numbers = _train("plain", loop, hook, schedule)
    for result in testing.run_ranks(_on_ranks, num_ranks, how, loop, hook, schedule):
        found, theirs = result.get()
        assert largest_difference(found, {name: expected[name] for name in found}) <= TOLERANCE
        assert theirs == pytest.approx(numbers, rel=1e-12)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("loop", LOOPS)
def test_all_gradients_of_a_pipeline(loop: str, num_ranks: int) -> None:
    _check(num_ranks, "pipeline", loop)


@pytest.mark.parametrize("loop", ["norm", "scaler"])
def test_all_gradients_of_several_pipelines(loop: str) -> None:
    _check(4, "pipeline", loop)


@pytest.mark.parametrize("loop", ["norm", "largest", "value", "logged", "scaler"])
def test_all_gradients_of_a_split_model(loop: str) -> None:
    _check(2, "tensor_parallel", loop)


@pytest.mark.parametrize("hook", ["clamp", "own norm", "after"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble", "hooked before"])
def test_hooks_of_the_parameters_of_a_pipeline_get_the_gradient_of_the_batch(schedule: str, hook: str) -> None:
    _check(2, "pipeline", "logged", hook, schedule)


def test_hooks_of_the_parameters_of_several_pipelines() -> None:
    _check(4, "pipeline", "logged", "own norm")


@pytest.mark.parametrize("hook", ["clamp", "own norm", "after"])
def test_hooks_of_the_parameters_of_a_split_model(hook: str) -> None:
    _check(2, "tensor_parallel", "logged", hook)


def _scaled_on(model: nn.Module, calls: list[str]) -> None:
    """Scale gradients where they leave each layer, as gradient reversal does."""
    for name, one in list(model.named_children())[1:]:  # torch warns of the first, whose input needs no gradient

        def scale(_: nn.Module, inward: Any, __: Any, name: str = name) -> Any:
            calls.append(name)
            return tuple(gradient if gradient is None else -0.9 * gradient for gradient in inward)

        one.register_full_backward_hook(scale)


def _module_hooks(_: World | None, schedule: str) -> tuple[Parameters, set[str]]:
    calls: list[str] = []
    model = network()
    x, y = drawn(8, 4), drawn(8, 4)
    if schedule == "plain":
        _scaled_on(model, calls)
        functional.mse_loss(model(x), y).backward()
    else:
        rw.mesh(pp=-1)
        step = rw.pipeline(model, functional.mse_loss, example=x, micro_batches=4, schedule=schedule)
        _scaled_on(model, calls)
        step(x, y)
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}, set(calls)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
def test_hooks_of_modules_run_in_every_stage_and_gradients_pass_them(schedule: str) -> None:
    expected, names = _module_hooks(None, "plain")
    results = [result.get() for result in testing.run_ranks(_module_hooks, 2, schedule)]
    for found, _ in results:
        assert largest_difference(found, {name: expected[name] for name in found}) <= TOLERANCE
    assert {name for found, _ in results for name in found} == set(expected)
    assert {name for _, called in results for name in called} == names


def _wrong(_: World, what: str) -> None:
    rw.mesh(tp=-1) if what == "hooked" else rw.mesh(pp=-1)
    model = network()
    if what == "hooked":
        model.get_parameter("2.weight").register_hook(_clamp)
        rw.tensor_parallel(model)
    step = rw.pipeline(model, functional.mse_loss, example=drawn(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(drawn(8, 4), drawn(8, 4))
    if what == "order":
        clip_grad_norm_(model.parameters(), 0.1, norm_type=0)
    torch.amp.GradScaler("cpu").step(optimizer)


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("hooked", ConfigurationError, "Parameter 2.weight has a hook, which tensor_parallel() would lose"),
        ("order", ConfigurationError, "The norm of order 0 cannot be computed over the stages of a pipeline"),
        ("not scaled", AssertionError, "Attempted step but _scale is None"),
    ],
)
def test_what_is_wrong_is_an_error_on_every_rank(what: str, kind: type[Exception], text: str) -> None:
    for result in testing.run_ranks(_wrong, 2, what):
        assert isinstance(result.error, kind)
        assert text in str(result.error)
