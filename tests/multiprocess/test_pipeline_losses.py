# SPDX-License-Identifier: Apache-2.0
"""`pipeline`: losses that are not means over samples are warned of, once; with their weights given they are exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from loss_steps import data, plain_model, said
from losses import CLASS_WEIGHTS, COUPLED, EXACT, labels
from staged_models import difference

import rankwise as rw
from rankwise import testing

if TYPE_CHECKING:
    from losses import Loss

    from rankwise.world import World

LOSSES: dict[str, Loss] = EXACT | {name: loss for name, (loss, _) in COUPLED.items()}
MEANS_OVER_SAMPLES = ("mse", "cross_entropy", "two_means", "power_mean", "sum_over_its_samples", "gather_then_mean")
WARNED = {
    "class_weights": "is a mean over what some samples have more of than others",
    "masked_by_index": "is a mean over what some samples have more of than others",
    "masked": "is a mean over what some samples have more of than others",
    "mse_sum": "is a sum over samples",
    "vae": "is a sum over samples",
    "rmse": "is neither a mean nor a sum over samples because of Sqrt",
    "contrastive": "is neither a mean nor a sum over samples because of Mm of two outputs",
}


def _train(_: World, name: str, mesh: dict[str, int]) -> tuple[float, list[str]]:
    rw.mesh(**mesh)
    model, plain = plain_model(), plain_model()
    x, y = data()[0]
    with said() as lines:
        # Gives the loss the outputs in the place of the inputs, which losses have only to know how many they are.
        step = rw.pipeline(model, lambda o, t: LOSSES[name](o, t, o), example=x, micro_batches=3)
        step(x, y)
        LOSSES[name](plain(x), y, x).backward()
        apart = difference(model, plain)
        step(x, y)
    return apart, [line for line in lines if "the loss of the pipeline" in line]


@pytest.mark.parametrize("name", MEANS_OVER_SAMPLES)
def test_means_over_samples_are_exact_and_not_warned_of(name: str) -> None:
    for result in testing.run_ranks(_train, 2, name, {"pp": 2}):
        apart, lines = result.get()
        assert apart < 1e-12
        assert lines == []


@pytest.mark.parametrize("name", WARNED)
def test_other_losses_are_warned_of_once_by_the_last_stage(name: str) -> None:
    lines = [result.get()[1] for result in testing.run_ranks(_train, 2, name, {"pp": 2})]
    assert [len(one) for one in lines] == [0, 1]
    assert WARNED[name] in lines[1][0]
    assert "test_pipeline_losses.py:" in lines[1][0]


def _with_weights(_: World) -> tuple[float, list[str]]:
    model, plain = plain_model(), plain_model()
    x, y = data()[0]
    with said() as lines:
        rw.mesh(pp=2)
        step = rw.pipeline(
            model,
            lambda o, t: EXACT["class_weights"](o, t, o),
            example=x,
            micro_batches=3,
            weight=lambda t: CLASS_WEIGHTS[labels(t)].sum(),
        )
        step(x, y)
        EXACT["class_weights"](plain(x), y, x).backward()
    return difference(model, plain), [line for line in lines if "the loss of the pipeline" in line]


def test_with_weights_they_are_exact() -> None:
    for result in testing.run_ranks(_with_weights, 2):
        apart, lines = result.get()
        assert apart < 1e-12
        assert lines == []


def test_one_copy_of_a_pipeline_speaks_for_all() -> None:
    results = testing.run_ranks(_train, 4, "mse_sum", {"pp": 2, "dp_replicate": 2})
    assert sum(len(result.get()[1]) for result in results) == 1
