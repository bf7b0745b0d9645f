# SPDX-License-Identifier: Apache-2.0
"""A run that was interrupted and continued, compared with one rank that was not: what its checkpoint lacks.

Values only; imports no torch. Used by ``procedure``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.verify import causes, compare, conclude
from rankwise.verify.compare import PLAUSIBLE, Cause, Evidence, Floor
from rankwise.verify.conclude import measured

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.verify.conclude import Verdict
    from rankwise.verify.records import RankRun, Run

_LACKS = {
    "data": ("the position of the loader", "checkpoints.save(..., loader=loader), or loader.state_dict()"),
    "forward": (
        "buffers of the model, or the position of a random generator",
        "model.state_dict() with its buffers; rankwise.Checkpointer, which saves positions, or torch.get_rng_state()",
    ),
    "gradient": ("something that the loss follows from", "all that a step changes and a later one reads"),
    "hyperparameters": ("the state of a scheduler", "scheduler.state_dict(), or checkpoints.save(..., scheduler=...)"),
    "optimizer state": (
        "the state of the optimizer",
        "optimizer.state_dict(), or checkpoints.save(..., optimizer=...)",
    ),
}
"""What a checkpoint lacks, by the phase of the first difference, and what to save."""


def compared(reference: RankRun, many: Run, floor: Floor) -> Verdict:
    """Return the verdict on N ranks that continue a run which was interrupted.

    Args:
        reference: one rank, not interrupted.
        many: the run on N ranks that continues the interrupted one.
        floor: what counts as rounding for the reference.
    """
    number = len(many.ranks)
    if not all(rank.steps for rank in many.ranks) or not conclude.has_ended_well(many):
        return conclude.not_compared(number, f"it cannot be continued: {conclude.error_of(many)}", many)
    done = _steps_before(reference, many.ranks)
    if not done:
        why = "it starts from " + ("its first step" if done == 0 else "parameters that one rank has before no step")
        return conclude.not_compared(
            number,
            f"when it is run again, {why}: it has saved nothing by then, or does not load it. Have it save within the "
            "first half of --steps, and load what it finds",
            many,
        )
    before = f"uninterrupted, they are equal over {len(reference.steps)} steps"
    one, continued = _from_step(reference, done), replace(many, ranks=tuple(_cut(many.ranks, reference, done)))
    rest = Floor(floor.dtype, _shifted(floor, done), floor.why_assumed)
    verdict, different = measured(one, continued.ranks, rest)
    note = f"{before}; interrupted, they continue after step {done}, from which steps are counted"
    verdict = replace(verdict, notes=(note,))
    if different is not None:
        evidence = Evidence(different.gap, one, continued.ranks)
        return replace(verdict, cause=_cause(evidence))
    return conclude.ended_apart(verdict, one, continued) or verdict


def _cause(evidence: Evidence) -> Cause:
    kept = causes.kept(evidence)
    what, fix = _LACKS.get(evidence.gap.phase, (evidence.gap.name, "it, and load it again"))
    if kept is not None and evidence.gap.phase in {"forward", "gradient"}:
        what = kept.words.partition(" ")[0]
        fix = "it too, a number in a dictionary: checkpoints.save(..., kept=kept) and restore(..., kept=kept)"
    return Cause(
        "resumed apart",
        f"a run that is interrupted and continued is not the uninterrupted one: its checkpoint lacks {what}",
        f"save and load {fix}",
        line=evidence.one.step_line,
    )


def _steps_before(reference: RankRun, ranks: Sequence[RankRun]) -> int | None:
    """Return how many steps of the reference precede a continued run; ``None`` if none has its parameters."""
    first = [rank.steps[0] for rank in ranks]
    errors = [max((gap.error for gap in compare.initial_gaps(step, first)), default=1.0) for step in reference.steps]
    nearest = errors.index(min(errors))
    return nearest if errors[nearest] <= PLAUSIBLE[reference.facts.dtype] else None


def _from_step(run: RankRun, done: int) -> RankRun:
    steps = tuple(replace(step, number=step.number - done) for step in run.steps[done:])
    return replace(run, steps=steps)


def _cut(ranks: Sequence[RankRun], reference: RankRun, done: int) -> list[RankRun]:
    """Leave out the steps that the reference was not recorded for."""
    if reference.end != "steps":
        return list(ranks)
    return [replace(rank, steps=rank.steps[: len(reference.steps) - done], end="steps") for rank in ranks]


def _shifted(floor: Floor, done: int) -> dict[tuple[int, compare.Phase], float] | None:
    if floor.measured is None:
        return None
    return {(step - done, phase): error for (step, phase), error in floor.measured.items() if step > done}
