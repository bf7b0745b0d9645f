# SPDX-License-Identifier: Apache-2.0
"""A measured step of a pipeline, and its drawing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from replicas import built
from staged_models import Skipping, drawn, mean_square

from rankwise.pipeline.pipeline import Pipeline, pipeline
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from rankwise.world.facts import World


def _measure(world: World, folder: str) -> tuple[float | None, list[Any], str]:
    model = built(Skipping)
    step: Pipeline = pipeline(model, mean_square, example=drawn(8, 6), schedule="interleaved_zero_bubble")
    with step.measure():
        step(drawn(8, 6), drawn(8, 3))
    step.draw(f"{folder}/schedule.svg")
    return step.bubble, step.stages, str(step)


def test_a_measured_step_is_drawn(tmp_path: Any) -> None:
    first, second = (result.get() for result in run_ranks(_measure, 2, str(tmp_path)))
    assert first == second
    assert first[0] is not None
    assert 0.0 < first[0] < 1.0
    assert [(stage.number, stage.rank) for stage in first[1]] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert sum(stage.cost_share for stage in first[1]) == pytest.approx(1.0)
    picture = (tmp_path / "schedule.svg").read_text()
    assert picture.count("<title>forward, stage") == 4 * 4
    assert picture.count("<title>backward of weights, stage") == 4 * 4
