# SPDX-License-Identifier: Apache-2.0
"""In steady state no step makes the CPU wait for the device, and N ranks compute what one rank computes.

Counted on the stand-in device with a backend that behaves as NCCL does.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from on_ranks import one_rank
from on_standin import FOLDER, WithStandin
from replicas import TOLERANCE, Parameters, largest_difference, part
from torch import nn
from torch.nn import functional

import rankwise as rw
from rankwise.replicate.state_guard.guard import VALUES_EVERY
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World

pytestmark = pytest.mark.timeout(240)  # the first of these tests may have to compile the device

WARM_STEPS = 3
COUNTED_STEPS = 4
NUM_CLASSES = 5
IGNORED = -100


class WithStrict(WithStandin):
    """A function whose process gets the device and the strict backend."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        sys.path.insert(0, FOLDER)
        import standin

        standin.load(strict=True)

        self.__dict__.update(state)


@pytest.fixture(scope="module", autouse=True)
def _strict_is_built() -> None:
    sources = importlib.util.spec_from_file_location("standin", Path(FOLDER, "standin", "__init__.py"))
    assert sources is not None
    assert sources.loader is not None
    standin = importlib.util.module_from_spec(sources)
    sources.loader.exec_module(standin)
    standin.built()
    standin.built("strict")


def _class_weights(output: torch.Tensor) -> torch.Tensor:
    return torch.arange(1.0, NUM_CLASSES + 1, dtype=output.dtype).to(output.device)


def _entropy(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, y)


def _weighted(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, y, weight=_WEIGHTS[output.device.type])


def _masked(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = (y != IGNORED).to(output.dtype)
    return (output.square().sum(1) * mask).sum() / mask.sum()


def _masked_at_least_one(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = (y != IGNORED).to(output.dtype)
    return (output.square().sum(1) * mask).sum() / mask.sum().clamp(min=1)


def _sum(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, y, reduction="sum") / 7.0


def _plain_sum(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, y, reduction="sum")


def _two_terms(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _entropy(output, y) + 0.3 * _masked(output, y) + output.square().mean()


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cross entropy": _entropy,
    "class weights": _weighted,
    "masked mean": _masked,
    "masked mean of at least one": _masked_at_least_one,
    "sum": _plain_sum,
    "several terms": _two_terms,
}
_WEIGHTS: dict[str, torch.Tensor] = {}


def _net(device: str, *, batchnorm: bool) -> nn.Module:
    torch.manual_seed(2)
    norm = [nn.BatchNorm1d(7)] if batchnorm else []
    layers = [
        nn.Linear(6, 7, bias=not batchnorm),
        *norm,
        nn.Tanh(),
        nn.Linear(7, 8),
        nn.Tanh(),
        nn.Linear(8, NUM_CLASSES),
    ]
    return nn.Sequential(*layers).double().to(device)


def _batches(
    device: str, rank: int, num_ranks: int, micro: int, *, ignores: bool = True
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return the microsteps of each step; in some the first rank ignores all of its targets."""
    generator = torch.Generator().manual_seed(1)
    steps = []
    for step in range(WARM_STEPS + COUNTED_STEPS):
        x = torch.randn(16, 6, dtype=torch.float64, generator=generator)
        y = torch.randint(0, NUM_CLASSES, (16,), generator=generator)
        y[torch.rand(16, generator=generator) < 0.3] = IGNORED
        if step % 2 and ignores:
            y[:8] = IGNORED
        y[-1] = 1
        own = [tuple(part(part(t, index, micro), rank, num_ranks).to(device) for t in (x, y)) for index in range(micro)]
        steps.append(own)
    return steps


def _host_syncs(device: str) -> int:
    return 0 if device == "cpu" else torch.standin.host_syncs()  # type: ignore[attr-defined]


def _state_of(model: nn.Module) -> Parameters:
    found = {name: one.detach() for name, one in model.state_dict().items()}
    whole = {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in found.items()}
    return {name: one.cpu().clone() for name, one in whole.items()}


def _train(world: World, strategy: str, loss: str, micro: int, options: tuple[str, ...]) -> tuple[int, Parameters]:
    device = world.device
    _WEIGHTS[torch.device(device).type] = _class_weights(torch.zeros((), dtype=torch.float64, device=device))
    model = _net(device, batchnorm="batchnorm" in options)
    if strategy == "replicate":
        rw.replicate(model, sync_batchnorm="batchnorm" in options)
    elif world.world_size > 1:
        rw.shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # BatchNorm would count samples that the loss does not.
    steps = _batches(device, world.rank, world.world_size, micro, ignores="batchnorm" not in options)
    before = 0
    for number, step in enumerate(steps):
        if number == WARM_STEPS:
            before = _host_syncs(device)
        for index, (x, y) in enumerate(step):
            is_last = index == len(step) - 1
            is_replicated = strategy == "replicate" or world.world_size > 1
            with rw.no_sync(model) if is_replicated and not is_last else nullcontext():
                output = model(x)
                amount = (y != IGNORED).sum()
                with rw.weight(model, amount) if "given" in options and is_replicated else nullcontext():
                    LOSSES[loss](output, y).backward()
        if "clips" in options:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    after = _host_syncs(device)
    return after - before, _state_of(model)


def _train_captured(world: World, captures: bool) -> Parameters:
    """Train for so many steps that everything which is compared now and then is, every second one captured."""
    device = world.device
    model = rw.replicate(_net(device, batchnorm=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (((x, y),), *_) = _batches(device, world.rank, world.world_size, 1)
    for number in range(WARM_STEPS + 2 * VALUES_EVERY):
        is_captured = captures and number >= WARM_STEPS and number % 2
        with torch.standin.capturing() if is_captured else nullcontext():  # type: ignore[attr-defined]
            optimizer.zero_grad()
            _entropy(model(x), y).backward()
            optimizer.step()
    return _state_of(model)


def _on_strict(fn: Callable[..., Any], world_size: int, *args: object) -> list[Any]:
    return [result.get() for result in run_ranks(WithStrict(fn), world_size, *args, device=None)]


def _check(reference: Parameters, found: list[tuple[int, Parameters]]) -> None:
    assert [num_syncs for num_syncs, _ in found] == [0] * len(found)
    for _, parameters in found:
        assert largest_difference(parameters, reference) < TOLERANCE


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_losses(strategy: str, loss: str) -> None:
    _, reference = one_rank(_train, "replicate", loss, 1, ())
    _check(reference, _on_strict(_train, 2, strategy, loss, 1, ()))


@pytest.mark.parametrize("loss", ["cross entropy", "masked mean", "sum"])
@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_accumulation_and_clipping(strategy: str, loss: str) -> None:
    _, reference = one_rank(_train, "replicate", loss, 1, ("clips",))
    _check(reference, _on_strict(_train, 2, strategy, loss, 2, ("clips",)))


@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_weights_on_the_device(strategy: str) -> None:
    _, reference = one_rank(_train, "replicate", "cross entropy", 1, ())
    _check(reference, _on_strict(_train, 2, strategy, "cross entropy", 2, ("given",)))


@pytest.mark.parametrize("loss", ["cross entropy", "sum"])
def test_synchronised_batchnorm(loss: str) -> None:
    _, reference = one_rank(_train, "replicate", loss, 1, ("batchnorm",))
    _check(reference, _on_strict(_train, 2, "replicate", loss, 1, ("batchnorm",)))


def test_nothing_waits_for_the_device_or_asks_it_while_a_graph_is_captured() -> None:
    reference = one_rank(_train_captured, False)
    for num_ranks in (1, 2):
        for parameters in _on_strict(_train_captured, num_ranks, True):
            assert largest_difference(parameters, reference) < TOLERANCE


def _pipelined(world: World, loss: str, options: tuple[str, ...]) -> tuple[int, Parameters]:
    device = world.device
    _WEIGHTS[torch.device(device).type] = _class_weights(torch.zeros((), dtype=torch.float64, device=device))
    copies = max(world.world_size // 2, 1)
    rw.mesh(pp=world.world_size // copies, dp_replicate=copies)
    model = _net(device, batchnorm=False)
    weight = (lambda y: (y != IGNORED).sum()) if "given" in options else None
    example = torch.zeros(4, 6, dtype=torch.float64, device=device)
    step = rw.pipeline(model, LOSSES[loss], example=example, micro_batches=3, weight=weight)
    optimizer = torch.optim.SGD([one for one in model.parameters() if not one.is_meta], lr=0.1, momentum=0.9)
    before = 0
    for number, ((x, y),) in enumerate(_batches(device, world.rank % copies, copies, 1)):
        if number == WARM_STEPS:
            before = _host_syncs(device)
        step(x, y)
        if "clips" in options:
            step.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    after = _host_syncs(device)
    own = {name: one for name, one in model.state_dict().items() if not one.is_meta}
    return after - before, {name: one.cpu().clone() for name, one in own.items()}


@pytest.mark.parametrize(
    ("loss", "num_ranks", "options"),
    [
        *((loss, 2, ()) for loss in ("cross entropy", "class weights", "masked mean", "sum")),
        ("cross entropy", 2, ("clips",)),
        ("cross entropy", 2, ("given",)),
        ("cross entropy", 4, ()),
    ],
)
def test_pipelines(loss: str, num_ranks: int, options: tuple[str, ...]) -> None:
    clips = tuple(one for one in options if one == "clips")
    _, reference = one_rank(_train, "replicate", loss, 1, clips)
    for num_syncs, parameters in _on_strict(_pipelined, num_ranks, loss, options):
        assert num_syncs == 0
        assert largest_difference(parameters, {name: reference[name] for name in parameters}) < TOLERANCE
