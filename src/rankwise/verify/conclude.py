# SPDX-License-Identifier: Apache-2.0
"""From the records of one rank and of N ranks to a verdict: the first difference, its cause, what agreed.

Values only, which the terminal, the JSON and the page show; imports no torch. ``procedure`` decides with it which runs
are needed.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from rankwise.errors import fold_ranks
from rankwise.verify import causes, compare, mistakes
from rankwise.verify.compare import EXACT, PHASES, PLAUSIBLE, Cause, Evidence, Floor, samples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.verify.compare import Difference, Gap, Phase
    from rankwise.verify.mistakes import Mistake
    from rankwise.verify.records import RankRun, Run

Status = Literal["equal", "differs", "not compared"]
EXIT_CODES: dict[Status, int] = {"equal": 0, "differs": 1, "not compared": 2}
TIMED_OUT = 124
"""Exit code of a run that took longer than its limit, as of the command ``timeout``."""
NUM_COMPARED = 2
"""In how many steps batches are looked at to tell whose they are."""
_ENDED = ("script", "steps")
_BECAUSE_OF_ANOTHER = ("rankwise.errors.PeerFailed", "rankwise.errors.PeerMissing")
_UNSEEDED = Cause(
    "unseeded",
    "two runs on one rank already differ: something is drawn from a generator that is not seeded",
    "call torch.manual_seed(0), random.seed(0) and numpy.random.seed(0) before data and model are made",
)


@dataclass(frozen=True, slots=True)
class First:
    """The first difference."""

    step: int
    phase: str
    name: str
    ranks: tuple[int, ...] = ()
    error: float = 0.0
    """Relative; 0 if it has no number."""
    multiple: float = 0.0
    """How many times the rounding that was allowed; 0 if it has no number."""


@dataclass(frozen=True, slots=True)
class Row:
    """One step of the table: how far apart each phase is, relative, and what was allowed."""

    step: int
    errors: dict[str, float]
    tolerances: dict[str, float]


@dataclass(frozen=True, slots=True)
class Modules:
    """How far apart the output of a module is in the step of the first difference, or the last one."""

    name: str
    kind: str
    error: float
    tolerance: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What comparing one number of ranks with one rank gave."""

    num_ranks: int
    status: Status
    why: str = ""
    """Why it could not be compared."""
    first: First | None = None
    cause: Cause | None = None
    also: tuple[Cause, ...] = ()
    """Further mistakes that were found on the way."""
    notes: tuple[str, ...] = ()
    num_steps: int = 0
    rows: tuple[Row, ...] = ()
    modules: tuple[Modules, ...] = ()

    @property
    def largest(self) -> float:
        """The largest relative difference of all steps."""
        return max((error for row in self.rows for error in row.errors.values()), default=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All comparisons of one script."""

    script: str
    dtype: str
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]
    runs: tuple[tuple[str, float], ...]
    """What was run, and how long it took in seconds."""
    seconds: float

    @property
    def exit_code(self) -> int:
        """0: equal for every number of ranks; 1: differs for one; 2: could not be compared."""
        codes = {EXIT_CODES[verdict.status] for verdict in self.verdicts}
        return 1 if 1 in codes else max(codes)

    def content(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**asdict(self), "exit_code": self.exit_code}


def measured(reference: RankRun, many: Sequence[RankRun], floor: Floor) -> tuple[Verdict, Difference | None]:
    """Return the verdict before its cause is looked for, and the first difference."""
    found = list(compare.gaps(reference, many))
    different = next(compare.differences(found, floor), None)
    num_steps = min(len(run.steps) for run in (reference, *many))
    verdict = Verdict(num_ranks=len(many), status="equal", num_steps=num_steps, rows=_table(found, floor))
    shown = num_steps
    if different is not None:
        gap = different.gap
        shown = gap.step
        first = First(gap.step, gap.phase, gap.name, gap.ranks, gap.error, different.multiple)
        verdict = replace(verdict, status="differs", first=first)
    modules = (gap for gap in found if (gap.step, gap.phase) == (shown, "forward"))
    tolerance = floor.tolerance(shown, "forward")
    return (
        replace(verdict, modules=tuple(Modules(gap.name, gap.kind, gap.error, tolerance) for gap in modules)),
        different,
    )


def _table(found: Sequence[Gap], floor: Floor) -> tuple[Row, ...]:
    """Return the largest difference of each phase and step."""
    worst: dict[int, dict[Phase, float]] = {}
    for gap in found:
        errors = worst.setdefault(gap.step, {})
        errors[gap.phase] = max(errors.get(gap.phase, 0.0), gap.error)
    return tuple(
        Row(
            step,
            {phase: errors[phase] for phase in PHASES if phase in errors},
            {phase: 0.0 if phase in EXACT else floor.tolerance(step, phase) for phase in PHASES if phase in errors},
        )
        for step, errors in worst.items()
    )


# -- conclusions ---------------------------------------------------------------------------------------------


def conclusion(reference: RankRun, many: Run, floor: Floor, found: Sequence[Mistake], *, is_joined: bool) -> Verdict:
    """Return the verdict on N ranks, each of which took a step.

    Args:
        reference: one rank, on the same batches.
        many: the run on N ranks.
        floor: what counts as rounding.
        found: mistakes that show in the run on N ranks alone.
        is_joined: whether the reference took the batches of the ranks together.
    """
    verdict, different = measured(reference, many.ranks, floor)
    num_steps = verdict.num_steps
    found = sorted(found, key=lambda finding: finding.step or num_steps + 1)
    if different is not None:
        gap = different.gap
        evidence = Evidence(gap, reference, many.ranks)
        draws_otherwise = any(call.drew and not call.drew_by_rows for step in evidence.theirs for call in step.calls)
        if is_joined and gap.phase == "forward" and draws_otherwise:
            why = "the model draws random numbers in a way that one rank cannot repeat for the samples of several"
            return replace(verdict, status="not compared", first=None, why=why)
        # A mistake in the data explains what follows from it.
        earlier = next((one.cause for one in found if 0 < one.step <= gap.step), None)
        cause, *others = [earlier] if earlier is not None else _causes(evidence, many)
        return replace(verdict, cause=cause, also=(*others, *(one.cause for one in found if one.cause is not cause)))
    if found:
        first = First(found[0].step, "data" if found[0].step else "files", found[0].cause.key)
        also = tuple(one.cause for one in found[1:])
        return replace(verdict, status="differs", first=first, cause=found[0].cause, also=also)
    if floor.last_step == 0:
        return replace(verdict, status="not compared", why="rounding alone makes two runs on one rank differ in step 1")
    return ended_apart(verdict, reference, many) or replace(
        verdict, num_steps=min(num_steps, floor.last_step or num_steps)
    )


def _causes(evidence: Evidence, many: Run) -> list[Cause]:
    """Return the cause of a difference and further ones: what rankwise has said of it, else what the numbers tell."""
    told = causes.explain(evidence)
    if told.key not in causes.GENERAL:
        return [told]
    errors = [rank for rank in many.ranks if rank.end.startswith("rankwise.errors.")]
    if any(not rank.end.startswith(_BECAUSE_OF_ANOTHER) for rank in errors):
        return [_failed(many, len(many.ranks))]
    warned = [_warned(text, told) for text in dict.fromkeys(text for rank in many.ranks for text in rank.warnings)]
    chosen, kept = mistakes.chosen(evidence.many[0]), mistakes.kept(evidence)
    if chosen is not None:
        return [chosen, *warned]
    if kept is None:
        return warned or [told]
    # In the first step, a loss that couples samples differs as well.
    return [kept, *warned] if evidence.gap.step > 1 else [*warned, kept]


def _warned(text: str, told: Cause) -> Cause:
    # The rank that warned is no part of the cause.
    words, _, fix = re.sub(r"^\[rank [^]]*\] ", "", text).partition("; ")
    return Cause("warned", f"rankwise warns of it: {words}", fix or told.fix, line=told.line)


def unseeded(one: RankRun, again: RankRun) -> Verdict | None:
    """Return the verdict if two runs on one rank already differ in their data or initial parameters."""
    gap = compare.is_unseeded(one, again)
    if gap is None:
        return None
    first = First(gap.step, gap.phase, gap.name, (0,), gap.error)
    return Verdict(num_ranks=1, status="differs", first=first, cause=_UNSEEDED)


def has_same_batches(one: RankRun, many: Sequence[RankRun]) -> bool:
    """Return whether N ranks together take the batches of one rank, or each rank computes all of them."""
    num_steps = min(len(one.steps), *(len(rank.steps) for rank in many))
    for number in range(min(num_steps, NUM_COMPARED)):
        mine, theirs = one.steps[number], [rank.steps[number] for rank in many]
        if all(step.inputs == mine.inputs for step in theirs):
            continue
        if sum(step.rows for step in theirs) != mine.rows:
            return False
        given = sum((Counter(step.inputs) for step in theirs), Counter[int]())
        loaded = samples(theirs)
        # Batches that each rank cuts by itself are the same whole batch on all ranks.
        is_cut = all(samples([step]) == samples([mine]) for step in theirs)
        is_same = Counter(mine.inputs) == given or samples([mine]) == loaded or is_cut
        if not is_same and not many[0].facts.uses_rankwise:
            return False
    return True


# -- how runs ended ------------------------------------------------------------------------------------------


def has_ended_well(run: Run) -> bool:
    """Return whether the script ran to its end, or for as many steps as were asked for."""
    return run.exit_code == 0 and all(rank.end in _ENDED for rank in run.ranks)


def error_of(run: Run) -> str:
    """Return the first line of the error that ended a run."""
    if run.exit_code == TIMED_OUT:
        return "it took longer than the limit"
    errors = [rank.end for rank in run.ranks if rank.end not in {"", *_ENDED}]
    if errors:
        return errors[0].splitlines()[0]
    last = run.output.strip().splitlines()
    return last[-1] if last else f"exit code {run.exit_code}"


def has_diverged(run: Run) -> bool:
    """Return whether rankwise has ended a run because its ranks differ, which is no matter of precision."""
    return any(rank.end.startswith("rankwise.errors.ReplicasDiffer") for rank in run.ranks)


def not_compared(num_ranks: int, why: str, run: Run) -> Verdict:
    """Return the verdict where runs cannot be compared."""
    tail = run.output.strip().splitlines()[-5:]
    missing = next((rank.missing for rank in run.ranks if rank.missing), "")
    if missing:
        why += (
            f"; {missing} is outside the working folder, of which each run gets a copy: give its absolute path; or, if "
            "the script finds it from its own place, run verify in the folder that holds both"
        )
    return Verdict(num_ranks=num_ranks, status="not compared", why=why, notes=tuple(tail))


def without_optimizer(num_ranks: int, run: Run) -> Verdict:
    """Return the verdict where one rank takes no step."""
    line = next((rank.spawn_line for rank in run.ranks if rank.spawn_line), "")
    if not line:
        return not_compared(num_ranks, "it takes no step of a torch optimizer", run)
    why = (
        f"it starts processes of its own ({line}), which verify does not see: it starts the ranks itself. Call the "
        'function that they run as each rank, `work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))` in place '
        "of torch.multiprocessing.spawn, without setting MASTER_ADDR and MASTER_PORT"
    )
    return not_compared(num_ranks, why, run)


def without_steps(num_ranks: int, one: RankRun, many: Run) -> Verdict:
    """Return the verdict where some rank took no step."""
    if not many.ranks:
        said = [line for line in many.output.splitlines() if line and not line.startswith("[rankwise]")]
        return not_compared(num_ranks, f"the ranks could not be started: {said[0] if said else error_of(many)}", many)
    if has_ended_well(many):
        return not_compared(num_ranks, "some rank takes no step of a torch optimizer", many)
    # What rankwise says of ranks that differ does not know of files.
    cause = (mistakes.loaded_apart(one, many.ranks) if has_diverged(many) else None) or _failed(many, num_ranks)
    return Verdict(num_ranks=num_ranks, status="differs", first=First(1, "steps", cause.key), cause=cause)


def ended_apart(verdict: Verdict, reference: RankRun, many: Run) -> Verdict | None:
    """Return the verdict on runs whose steps are equal, if they did not end alike."""
    cause = _end_differs(reference, many)
    if cause is None:
        return None
    return replace(verdict, status="differs", first=First(verdict.num_steps + 1, "steps", cause.key), cause=cause)


def _end_differs(reference: RankRun, many: Run) -> Cause | None:
    """Return why the ranks took fewer or more steps than one rank, or failed after them."""
    if reference.end == "steps" and "parameter_server" in many.ranks[0].facts.strategies:
        # The servers wait for workers that verify has stopped.
        return None
    counts = [len(rank.steps) for rank in many.ranks]
    mine, line = len(reference.steps), reference.steps[-1].step_line
    evidence = tuple(f"rank {rank}: {count} steps" for rank, count in enumerate(counts))
    stopped = [rank for rank, run in enumerate(many.ranks) if run.end in _ENDED]
    # A rank that waits for one that has stopped fails in a later step.
    least = min((counts[rank] for rank in stopped), default=max(counts) + 1)
    if any(one.end_line and len(one.steps) < least and not one.end.startswith("rankwise.") for one in many.ranks):
        return _failed(many, len(counts))
    if len(set(counts)) > 1 or (stopped and len(stopped) < len(counts)):
        ended = f", where {fold_ranks(stopped)} ended" if stopped and len(stopped) < len(counts) else ""
        return Cause(
            "local stop",
            f"ranks take different numbers of steps{ended}: a rank decides to stop, or to skip a step, from its own "
            "value",
            "decide from a value that is equal on all ranks: rankwise.mean(loss, num_samples), or all_reduce it first",
            evidence,
            line,
        )
    if many.exit_code == TIMED_OUT:
        return Cause(
            "hang",
            f"the ranks make no progress after step {counts[0]}",
            "run it with `rankwise run`, and look at what each rank waits for with `rankwise stacks`",
            evidence,
        )
    if not has_ended_well(many):
        return _failed(many, len(counts))
    if counts[0] != mine:
        return Cause(
            "number of steps",
            f"one rank takes {mine} steps and {len(counts)} ranks take {counts[0]}",
            "divide the samples of an epoch over the ranks, by rankwise.DataLoader(global_batch_size=...)",
            evidence,
            line,
        )
    return None


def _failed(many: Run, num_ranks: int) -> Cause:
    ended = [rank for rank in many.ranks if rank.end not in {"", *_ENDED}]
    # The other ranks raise because of the one that failed first.
    failed = [rank for rank in ended if not rank.end.startswith(_BECAUSE_OF_ANOTHER)]
    words = (
        f"it runs on one rank and fails on {num_ranks} ranks: {error_of(replace(many, ranks=tuple(failed or ended)))}"
    )
    if not failed:
        return Cause("failed", words, _advice(ended) or "fix this error")
    alike = [rank.facts.rank for rank in failed if rank.end == failed[0].end]
    return Cause(
        "failed", f"{words}, on {fold_ranks(alike)}", _advice(failed) or "fix this error", line=failed[0].end_line
    )


def _advice(ranks: Sequence[RankRun]) -> str | None:
    for rank in ranks:
        _, found, rest = rank.end.partition("\n  do  ")
        if found:
            return " ".join(line.strip() for line in rest.splitlines())
    return None


# -- runs that were interrupted and continued ------------------------------------------------------------------

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


def resumed_verdict(reference: RankRun, many: Run, floor: Floor) -> Verdict:
    """Return the verdict on N ranks that continue a run which was interrupted.

    Args:
        reference: one rank, not interrupted.
        many: the run on N ranks that continues the interrupted one.
        floor: what counts as rounding for the reference.
    """
    number = len(many.ranks)
    if not all(rank.steps for rank in many.ranks) or not has_ended_well(many):
        return not_compared(number, f"it cannot be continued: {error_of(many)}", many)
    done = _steps_before(reference, many.ranks)
    if not done:
        why = "it starts from " + ("its first step" if done == 0 else "parameters that one rank has before no step")
        return not_compared(
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
        return replace(verdict, cause=_lacking(evidence))
    return ended_apart(verdict, one, continued) or verdict


def _lacking(evidence: Evidence) -> Cause:
    kept = mistakes.kept(evidence)
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
