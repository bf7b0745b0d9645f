# SPDX-License-Identifier: Apache-2.0
"""`replicate` and `shard` on a device: a rank queues its step before the CPUs of the other ranks have reported theirs.

On the stand-in, with a backend that behaves as NCCL does. What ranks report of their losses is checked a step later;
where a rank's loss is unlike its own before, or it has no samples, results are exact or an error, in that step.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from loss_steps import plain_model
from losses import EXACT
from on_ranks import one_rank
from on_standin import build_standin, on_standin, results_on_standin
from replicas import TOLERANCE, Parameters, largest_difference, part
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import rankwise as rw
from rankwise.comm.backends.torch_channels import TorchChannel
from rankwise.errors import CollectiveMismatch, ConfigurationError, PeerFailed, ReplicasDiffer

if TYPE_CHECKING:
    from collections.abc import Callable

    from losses import Loss

    from rankwise.testing import RankResult
    from rankwise.world.facts import World

pytestmark = pytest.mark.timeout(240)  # the first of these tests may have to compile the device and its backend

WARM_STEPS = 5
SIZES = (9, 4, 7, 8, 6, 5, 2, 9, 1, 6)
"""Of the global batches: some of those after the first steps leave ranks without samples."""


@pytest.fixture(scope="module", autouse=True)
def _standin_is_built() -> None:
    build_standin(strict=True)


def _strict(fn: Callable[..., Any], world_size: int, *args: object) -> list[Any]:
    return on_standin(fn, world_size, *args, backend="strict")


def _batches(world: World, sizes: tuple[int, ...] = SIZES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for size in sizes:
        x, y = (torch.randn(size, width, generator=generator, dtype=torch.float64) for width in (3, 4))
        found.append(tuple(part(one, world.rank, world.world_size).to(world.device) for one in (x, y)))
    return found


def _sum(o: torch.Tensor, t: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(o, t, reduction="sum")


STRATEGIES: dict[str, Callable[[nn.Module], nn.Module]] = {"replicate": rw.replicate, "shard": rw.shard}
ALTERNATING: list[Loss] = [EXACT["mean_and_sum"], EXACT["mse"], _sum]
LOSSES: dict[str, list[Loss]] = {
    "mean": [EXACT["mse"]],
    "sum": [_sum],
    "several terms": [EXACT["mean_and_sum"]],
    "sum over its samples": [EXACT["sum_over_its_samples"]],
    "in turn": ALTERNATING,
}


def _train(world: World, strategy: str, name: str, micro: int) -> Parameters:
    model = plain_model().to(world.device)
    if world.world_size > 1:
        STRATEGIES[strategy](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = LOSSES[name]
    for number, (x, y) in enumerate(_batches(world)):
        for index in range(micro):
            loss = losses[number % len(losses)](model(x), y, x)
            if index < micro - 1:
                with rw.no_sync(model):
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: _whole(value) for key, value in model.state_dict().items()}


def _whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu().clone()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("strategy", "num_ranks"), [("replicate", 2), ("replicate", 3), ("shard", 2)])
def test_ranks_without_samples_are_exact_in_later_steps(strategy: str, num_ranks: int, name: str) -> None:
    reference = one_rank(_train, strategy, name, 1)
    for found in _strict(_train, num_ranks, strategy, name, 1):
        assert largest_difference(found, reference) < TOLERANCE


# -- a rank that is late ---------------------------------------------------------------------------------


def _hold_reports(held: list[Callable[[], None]]) -> None:
    """Have what CPUs tell one another of a step be sent by the test, not when the step is queued."""
    start = TorchChannel.start

    def start_later(channel: TorchChannel, *sent: Any) -> None:
        if channel.body.device.type == "cpu":
            held.append(partial(start, channel, *sent))
        else:
            start(channel, *sent)

    TorchChannel.start = start_later  # type: ignore[method-assign]


def _report_afterwards(world: World, strategy: str, name: str) -> int:
    """Have rank 1 report its loss only after rank 0 has queued the whole step; return the number of such steps."""
    store = dist.distributed_c10d._get_default_store()
    model = STRATEGIES[strategy](plain_model().to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = LOSSES[name]
    held: list[Callable[[], None]] = []
    num_held = 0
    for number, (x, y) in enumerate(_batches(world, (8,) * (WARM_STEPS + len(losses) * 3))):
        if number == WARM_STEPS + len(losses) and world.rank == 1:
            _hold_reports(held)
        losses[number % len(losses)](model(x), y, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0:
            store.set(f"queued {number}", "")
        elif held:
            # Waits without waiting for the device.
            store.get(f"queued {number}")
            for send in held:
                send()
            held.clear()
            num_held += 1
    return num_held


@pytest.mark.parametrize("name", ["mean", "sum", "several terms", "in turn"])
@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_a_rank_queues_its_step_while_the_other_has_not_reported(strategy: str, name: str) -> None:
    assert _strict(_report_afterwards, 2, strategy, name) == [0, 2 * len(LOSSES[name])]


# -- a rank that deviates --------------------------------------------------------------------------------


def _other_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, deviates: bool) -> None:
    (_sum(model(x), y, x) if deviates else functional.mse_loss(model(x), y)).backward()


def _unlike_settings(model: nn.Module, x: torch.Tensor, y: torch.Tensor, deviates: bool) -> None:
    functional.mse_loss(model(x), y).backward()
    if deviates:
        for optimizer in _optimizers:
            optimizer.param_groups[0]["lr"] = 0.5


_optimizers: list[torch.optim.Optimizer] = []


def _deviate(world: World, strategy: str, step: Callable[..., None]) -> list[tuple[int, str]]:
    """Have rank 1 deviate in a late step; return on each rank in which step it noticed, and what."""
    model = STRATEGIES[strategy](plain_model().to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    _optimizers[:] = [optimizer]
    for number, (x, y) in enumerate(_batches(world, (8,) * (2 * WARM_STEPS))):
        try:
            step(model, x, y, world.rank == 1 and number == WARM_STEPS)
        except (ConfigurationError, CollectiveMismatch, ReplicasDiffer) as error:
            error.supplement(evidence=f"noticed in step {number}\n{error.evidence}")
            raise
        optimizer.step()
        optimizer.zero_grad()
    return []


def _errors(results: list[RankResult]) -> list[str]:
    found = []
    for result in results:
        with pytest.raises((ConfigurationError, CollectiveMismatch, ReplicasDiffer, PeerFailed)) as caught:
            result.get()
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_a_rank_whose_loss_is_unlike_the_others_is_an_error_in_that_step(strategy: str) -> None:
    first, second = _errors(results_on_standin(_deviate, 2, strategy, _other_loss, backend="strict"))
    assert "does not have the same terms on all ranks" in second
    assert f"noticed in step {WARM_STEPS}" in second
    assert "does not have the same terms on all ranks" in first
    assert f"found after backward {WARM_STEPS + 1} of" in first or "rank 1" in first


@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_settings_that_differ_are_an_error_a_step_later(strategy: str) -> None:
    for text in _errors(results_on_standin(_deviate, 2, strategy, _unlike_settings, backend="strict")):
        assert "lr" in text
        # Set in the step before it is first reported, and compared in the step after that.
        assert f"noticed in step {WARM_STEPS + 2}" in text
