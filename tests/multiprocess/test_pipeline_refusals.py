# SPDX-License-Identifier: Apache-2.0
"""What a pipeline refuses: on every rank, before anything changes, and so that ranks can continue."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from replicas import TOLERANCE, built, largest_difference
from said import check_said
from staged_models import Residual, Skipping, difference, drawn, mean_square
from torch import nn

import rankwise as rw
from rankwise.errors import CollectiveMismatch, ConfigurationError
from rankwise.pipeline.pipeline import pipeline
from rankwise.replicate.device_mesh import mesh
from rankwise.replicate.no_sync_and_weight import no_sync
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.Sequential(Residual(4), Residual(4))
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.second(h) if h.sum() > 0 else h


REFUSALS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "unknown name": (Skipping, {"split": ["layer.3"]}, "layers.3"),
    "within a block": (
        Skipping,
        {"split": ["layers.3.second"]},
        "cut before 'layers.3', or after it: before 'layers.4'",
    ),
    "not called": (Skipping, {"split": ["never"]}, "not called"),
    "empty stage": (Skipping, {"split": ["layers"]}, "would be empty"),
    "one name": (Skipping, {"split": "layers.33"}, "layers.3"),
    "no name": (Skipping, {"split": [2]}, "names of modules, not 2"),
    "no loss": (Skipping, {"loss_fn": None}, "loss_fn must be a function"),
    "no weight": (Skipping, {"weight": 3}, "weight must be a function"),
    "wrong example": (Skipping, {"example": drawn(4, 5)}, "float64[2, 5] on cpu"),
    "too many cuts": (Skipping, {"split": ["layers.1", "layers.2"]}, "2 stages need 1"),
    "unknown schedule": (Skipping, {"schedule": "1F1B"}, 'schedule="1f1b"'),
    "micro-batches": (
        Skipping,
        {"schedule": "interleaved_1f1b", "micro_batches": 5},
        "pass micro_batches=4 or 6",
    ),
    "no micro-batches": (Skipping, {"micro_batches": 0}, "at least 1"),
    "tied": (Tied, {"split": ["middle.1"]}, "first.weight = last.weight is used on stages 0, 1"),
    "tied, by cost": (Tied, {}, "shared: first.weight = last.weight"),
    "one block": (partial(nn.Linear, 4, 4), {}, "1 blocks for 2 stages"),
    "depends on tensor values": (Deciding, {}, "depends on tensor values"),
}


def _refused(world: World) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for what, (make, options, _) in REFUSALS.items():
        model = built(make)
        x = drawn(8, 6 if make is Skipping else 4)
        before = copy.deepcopy(model.state_dict())
        try:
            pipeline(model, **{"loss_fn": mean_square, "example": x, **options})
        except ConfigurationError as error:
            found[what] = [str(error)]
        assert largest_difference(model.state_dict(), before) == 0.0
        assert not any(parameter.is_meta for parameter in model.parameters())
        model(x)
    model = built(Skipping)
    step = pipeline(model, mean_square, example=drawn(8, 6))
    for call in (
        lambda: model(drawn(8, 6)),
        lambda: pipeline(model, mean_square, example=drawn(8, 6)),
        lambda: rw.replicate(model),
        lambda: step(drawn(8, 6), drawn(7, 3)),
        lambda: step(drawn(0, 6), drawn(0, 3)),
        lambda: step.draw("schedule.svg"),
        lambda: no_sync(model).__enter__(),
    ):
        with pytest.raises(ConfigurationError) as caught:
            call()
        found.setdefault("afterwards", []).append(str(caught.value))
    return found


def test_impossible_arguments_are_refused_on_every_rank_before_anything_changes() -> None:
    for result in run_ranks(_refused, 2):
        found = result.get()
        for what, (_, _, expected) in REFUSALS.items():
            assert expected in found[what][0], what
        afterwards = [
            "its predict()",
            "once per model",
            "pipeline() was already called",
            "8 samples, but target has 7",
            "no samples",
            "step.measure()",
            "no_sync() does not apply to",
        ]
        check_said(found["afterwards"], afterwards)


def _refuse_shards(world: World) -> str:
    mesh(pp=2, dp_shard=2)
    with pytest.raises(ConfigurationError) as caught:
        pipeline(built(Skipping), mean_square, example=drawn(4, 6))
    return str(caught.value)


def test_sharded_stages_are_refused_with_the_nearest_mesh() -> None:
    for result in run_ranks(_refuse_shards, 4):
        assert "rankwise.mesh(pp=2, dp_replicate=2, tp=1)" in result.get()


DIFFERENT: dict[str, tuple[list[dict[str, Any]], str]] = {
    "split": ([{"split": ["layers.2"]}, {"split": ["layers.3"]}], 'rank 0: {"micro_batches": 2'),
    "schedule": ([{"schedule": "gpipe"}, {"schedule": "1f1b"}], '"schedule": "1f1b"'),
    "micro-batches": ([{"micro_batches": 2}, {"micro_batches": 3}], '"micro_batches": 3'),
}


def _mixed_up(world: World, folder: str) -> None:
    for options, expected in DIFFERENT.values():
        with pytest.raises(ConfigurationError, match=expected):
            pipeline(built(Skipping), mean_square, example=drawn(8, 6), **options[world.rank])
    model = built(Skipping)
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    step = pipeline(model, mean_square, example=drawn(8, 6))
    with pytest.raises(ConfigurationError, match="An optimizer \\(SGD\\) was created before pipeline"):
        step(drawn(8, 6), drawn(8, 3))
    before.param_groups.clear()
    with pytest.raises(ConfigurationError, match="received different batches"):
        step(drawn(8, 6, seed=world.rank), drawn(8, 3))
    with pytest.raises(CollectiveMismatch, match=r"x=float64\[7, 6\]"):
        step(drawn(8 - world.rank, 6), drawn(8 - world.rank, 3))
    with pytest.raises(CollectiveMismatch, match=r"x=float64\[7, 6\]"):
        step.predict(drawn(8 - world.rank, 6))
    with pytest.raises(ConfigurationError, match="cannot be called with this batch"):
        step(drawn(8, 5), drawn(8, 3))
    with pytest.raises(ConfigurationError, match="at least 0"):
        step.clip_grad_norm_(-1.0)
    one = built(Skipping)
    step(drawn(8, 6), drawn(8, 3))
    mean_square(one(drawn(8, 6)), drawn(8, 3)).backward()
    assert difference(model, one) <= TOLERANCE
    model.load_state_dict(built(Skipping).state_dict())  # what other ranks hold is passed over, without a warning
    # From the meta device: nothing is trained before it is filled.
    path = f"{folder}/whole.safetensors"
    rw.save_weights(path, one)
    with torch.device("meta"):
        model = Skipping().double()
    step = pipeline(model, mean_square, example=drawn(8, 6), schedule="zbv_zero_bubble")
    with pytest.raises(ConfigurationError, match=r"(have|has) not been initialized since"):
        step(drawn(8, 6), drawn(8, 3))
    rw.load_weights(path, model)
    step(drawn(8, 6), drawn(8, 3))
    assert difference(model, one) <= TOLERANCE


def test_ranks_with_different_calls_raise_and_can_continue(tmp_path: Any) -> None:
    for result in run_ranks(_mixed_up, 2, str(tmp_path)):
        result.get()
