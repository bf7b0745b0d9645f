# SPDX-License-Identifier: Apache-2.0
"""An error on one rank alone is raised on all ranks and names it, and the ranks can continue together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from replicas import built
from split_models import Mlp
from staged_models import Residual, drawn, mean_square
from torch import nn

import rankwise as rw
from rankwise.errors import ConfigurationError, PeerFailed
from rankwise.pipeline.pipeline import pipeline
from rankwise.replicate.device_mesh import mesh
from rankwise.shard.shard import shard
from rankwise.tensor_parallel.tensor_parallel import tensor_parallel
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World


class Ends(nn.Module):
    """The same names and shapes, whether its ends share a parameter or not."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.Sequential(Residual(4), Residual(4))
        self.last = nn.Linear(4, 4)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


def _pipeline(model: nn.Module | None = None, **options: Any) -> None:
    given = {"loss_fn": mean_square, "example": drawn(8, 4), "split": ["middle.1"], **options}
    pipeline(built(lambda: Ends(tied=False)) if model is None else model, **given)


def _replicated() -> nn.Module:
    return rw.replicate(nn.Linear(2, 2))


@dataclass(frozen=True)
class Case:
    """A call that is right on all ranks but one."""

    right: Callable[[], object]
    wrong: Callable[[], object]
    words: str
    """Of the error, on every rank."""
    prepare: Callable[[], object] = lambda: None
    world_size: int = 2


def _worker_group(model: nn.Module, **options: Any) -> None:
    rw.local_sgd(model, **{"every": 2, **options})


CASES = {
    "pipeline, its arguments": Case(_pipeline, lambda: _pipeline(loss_fn=None), "loss_fn must be a function"),
    "pipeline, its example": Case(_pipeline, lambda: _pipeline(example=drawn(8, 5)), "float64[4, 5] on cpu"),
    "pipeline, its cuts": Case(_pipeline, lambda: _pipeline(built(lambda: Ends(tied=True))), "is used on stages 0, 1"),
    "tensor_parallel": Case(
        lambda: tensor_parallel(built(Mlp)), lambda: tensor_parallel(built(Mlp), "ato"), "Unknown plan 'ato'"
    ),
    "local_sgd, its arguments": Case(
        lambda: _worker_group(nn.Linear(2, 2)), lambda: _worker_group(nn.Linear(2, 2), every=0), "at least 1, got 0"
    ),
    "local_sgd, its model": Case(
        lambda: _worker_group(nn.Linear(2, 2)),
        lambda: _worker_group(nn.Linear(2, 2).requires_grad_(False)),
        "no parameter that needs a gradient",
    ),
    "local_sgd, within its worker group": Case(
        lambda: _worker_group(_replicated()),
        lambda: (_replicated(), _worker_group(nn.Linear(2, 2))),
        "This model is not distributed over the ranks of its worker group",
        lambda: mesh(worker_groups=2, dp_replicate=2),
        4,
    ),
    "shard": Case(lambda: shard(nn.Linear(2, 2)), lambda: shard(nn.Linear(2, 2), blocks=-5), "blocks=-5 does not name"),
    "mesh": Case(lambda: mesh(dp_replicate=2), lambda: mesh(dp_replicate=3), "dp_replicate=3"),
    "DataLoader": Case(
        lambda: rw.DataLoader(torch.ones(4), global_batch_size=2),
        lambda: rw.DataLoader(torch.ones(4), global_batch_size=0),
        "global_batch_size",
    ),
    "ShardedSampler": Case(
        lambda: rw.ShardedSampler(torch.ones(4), global_batch_size=2),
        lambda: rw.ShardedSampler(torch.ones(4), global_batch_size=0),
        "global_batch_size",
    ),
}


def _one_is_refused(world: World, name: str, odd: int) -> tuple[str, str, int]:
    case = CASES[name]
    case.prepare()
    with pytest.raises((ConfigurationError, PeerFailed)) as caught:
        (case.wrong if world.rank == odd else case.right)()
    assert getattr(caught.value, "rank", odd) == odd
    # The ranks are at the same place: what they do next fits together.
    return type(caught.value).__name__, str(caught.value), rw.all_reduce(1)


@pytest.mark.parametrize("odd", ["first", "last"])
@pytest.mark.parametrize("name", CASES)
def test_an_error_on_one_rank_is_raised_on_all_and_they_can_continue(name: str, odd: str) -> None:
    case = CASES[name]
    rank = 0 if odd == "first" else case.world_size - 1
    results = run_ranks(_one_is_refused, case.world_size, name, rank, join_timeout_seconds=20.0)
    for number, result in enumerate(results):
        kind, message, total = result.get()
        assert kind == ("ConfigurationError" if number == rank else "PeerFailed")
        assert case.words in message
        assert total == case.world_size


class _BreaksOff(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, *__: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


class Breaking(nn.Linear):
    """Can be traced, and not measured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _BreaksOff.apply(super().forward(x))  # type: ignore[no-any-return]


def _cannot_be_measured(_: World) -> tuple[str, int]:
    model = built(lambda: nn.Sequential(Breaking(4, 4), Breaking(4, 4)))
    with pytest.raises((ZeroDivisionError, PeerFailed)) as caught:
        pipeline(model, mean_square, example=drawn(8, 4))
    return type(caught.value).__name__, rw.all_reduce(1)


def test_blocks_that_cannot_be_measured_are_an_error_of_all_ranks() -> None:
    results = [result.get() for result in run_ranks(_cannot_be_measured, 2, join_timeout_seconds=20.0)]
    assert results == [("ZeroDivisionError", 2), ("PeerFailed", 2)]


def _refused_before_it_meets(world: World, odd: int) -> None:
    rw.replicate(nn.ReLU() if world.rank == odd else nn.Linear(2, 2))


@pytest.mark.parametrize("odd", [0, 2])
def test_an_error_of_replicate_on_one_rank_is_raised_on_all(odd: int) -> None:
    results = run_ranks(_refused_before_it_meets, 3, odd, join_timeout_seconds=30.0)
    for rank, result in enumerate(results):
        assert "The model has no parameter that needs a gradient" in str(result.error)
        assert isinstance(result.error, ConfigurationError if rank == odd else PeerFailed)
        assert getattr(result.error, "rank", odd) == odd
