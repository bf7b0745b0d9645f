# SPDX-License-Identifier: Apache-2.0
"""Records of rankwise verify, made by hand: a model of two parameters on one rank and on two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rankwise.verify.compare import Floor
from rankwise.verify.records import (
    Batch,
    Call,
    Facts,
    Loader,
    ModuleOutput,
    Parameter,
    RankRun,
    Run,
    Sketch,
    Step,
)

FLOOR = Floor("float64", {})
GRADIENT = (1.0, -2.0, 3.0, 0.5, 1.5, -1.0, 2.0, 4.0)
START = (5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0)
LINE = "train.py:7"


def sketch(values: tuple[float, ...], factor: float = 1.0, rows: int = 1) -> Sketch:
    """Return a sketch whose projections are ``values`` times a factor."""
    scaled = tuple(value * factor for value in values)
    return Sketch((4,), rows, sum(value * value for value in scaled) / len(scaled), scaled)


def parameter(name: str, gradient: float = 1.0, local: float = 1.0, lr: float = 0.1, start: float = 1.0) -> Parameter:
    """Return a parameter whose gradient is ``GRADIENT`` times a factor."""
    before = sketch(START, start)
    after = Sketch(
        before.shape,
        1,
        before.squares,
        tuple(one - lr * gradient * two for one, two in zip(before.projections, GRADIENT, strict=True)),
    )
    return Parameter(name, sketch(GRADIENT, gradient), sketch(GRADIENT, local), before, after)


def step(samples: tuple[int, ...], **changes: Any) -> Step:
    """Return the first step of a rank that takes ``samples``; what it passes to its models are they."""
    rows = len(samples)
    output = sketch(GRADIENT, sum(samples) / 10, rows=rows)
    usual = Step(
        number=1,
        optimizer="SGD",
        rows=rows,
        inputs=samples,
        batches=(Batch(0, 0, samples),),
        calls=(Call(rows, drew=False, drew_by_rows=True, line=LINE),),
        modules=(
            ModuleOutput("Net.first", "Linear", output),
            ModuleOutput("Net", "Net", output, sketch(START, sum(samples), rows=rows)),
        ),
        losses=(1.0,),
        parameters=(parameter("Net.first.weight"), parameter("Net.last.weight")),
        buffers={},
        hyperparameters=({"lr": 0.1},),
        clipped=(),
        num_scheduler_steps=0,
        loss_line=LINE,
        step_line=LINE,
    )
    return replace(usual, **changes)


def rank_run(*steps: Step, rank: int = 0, **changes: Any) -> RankRun:
    """Return the run of a rank that trained to the end of its script."""
    numbered = tuple(replace(one, number=number) for number, one in enumerate(steps, start=1))
    loader = Loader(0, len(steps) or None, 4, "DistributedSampler", shuffles=True, line=LINE)
    run = RankRun(Facts(rank, "float64"), numbered, (loader,), end="script")
    return replace(run, **changes)


def one_rank(**changes: Any) -> RankRun:
    """Return the run on one rank: one step on four samples."""
    return rank_run(step((1, 2, 3, 4), **changes))


def two_ranks(first: dict[str, Any] | None = None, second: dict[str, Any] | None = None) -> Run:
    """Return the run on two ranks, equal to that of one but for changes of their steps."""
    ranks = (
        rank_run(step((1, 2), **(first or {}))),
        rank_run(step((3, 4), **(second if second is not None else first or {})), rank=1),
    )
    return Run(ranks, 0)
