# SPDX-License-Identifier: Apache-2.0
"""A rank that fails or dies in a pipeline ends the step on every rank."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from replicas import built
from staged_models import Skipping, drawn, mean_square
from torch import nn

from rankwise.errors import ConfigurationError, PeerFailed
from rankwise.pipeline.pipeline import pipeline
from rankwise.testing import RankDied, kill_self, run_ranks

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World

FAILING_SECONDS = 8.0
BAD = 100.0


class Failing(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 3 and x.device.type == "cpu" and type(x) is torch.Tensor:
            if self.how == "die":
                kill_self()
            message = "the layer is bad"
            raise ValueError(message)
        return x


def _fail(world: World, how: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), Failing(how), nn.Linear(4, 4)).double()
    step = pipeline(model, mean_square, example=drawn(4, 4), micro_batches=2, split=["1", "2"])
    step(drawn(4, 4), drawn(4, 4))
    started = time.monotonic()
    try:
        step(drawn(6, 4), drawn(6, 4))
    except PeerFailed as error:
        error.add_note(f"after {time.monotonic() - started} s")
        raise


def test_a_rank_that_fails_ends_the_step_on_every_rank(run_ranks: RunRanks) -> None:
    *others, failed = run_ranks(_fail, 3, "raise")
    assert isinstance(failed.error, ValueError)
    assert any("in the forward of stage 2, micro-batch 0" in note for note in failed.error.__notes__)
    for result in others:
        assert isinstance(result.error, PeerFailed)
        assert "the layer is bad" in str(result.error)
        waited = next(note for note in result.error.__notes__ if note.startswith("after "))
        assert float(waited.split()[1]) < FAILING_SECONDS


def _skip_a_loss(world: World) -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if target[0, 0] > BAD:
            message = "bad target"
            raise FloatingPointError(message)
        return mean_square(output, target)

    step = pipeline(built(Skipping), loss, example=drawn(4, 6), micro_batches=2)
    try:
        step(drawn(4, 6), drawn(4, 3) + 2 * BAD)
    except FloatingPointError:
        step(drawn(4, 6), drawn(4, 3))


def test_a_step_that_broke_off_cannot_be_skipped() -> None:
    waiting, skipping = run_ranks(_skip_a_loss, 2)
    assert isinstance(waiting.error, PeerFailed)
    assert "bad target" in str(waiting.error)
    assert isinstance(skipping.error, ConfigurationError)
    assert "was aborted" in str(skipping.error)


def test_a_rank_that_dies_ends_the_step_on_every_rank(run_ranks: RunRanks) -> None:
    *others, dead = run_ranks(_fail, 3, "die")
    assert isinstance(dead.error, RankDied)
    for result in others:
        assert result.error is not None
        assert "2" in str(result.error).splitlines()[0], "names the rank that is gone"
