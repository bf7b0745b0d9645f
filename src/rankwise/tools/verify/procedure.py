# SPDX-License-Identifier: Apache-2.0
"""The order of the runs, and what is concluded from them: a report on every number of ranks.

One rank, one rank with each batch permuted (the rounding of the script), N ranks; and where the script's batch size is
per rank, one rank on the batches of the N ranks together.
"""

from __future__ import annotations

import shlex
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.tools.verify import causes, compare
from rankwise.tools.verify.causes import Cause, Evidence
from rankwise.tools.verify.compare import Floor
from rankwise.tools.verify.runs import LEAST_LIMIT_SECONDS, TIMES_SLOWER, Workspace
from rankwise.tools.verify.verdict import First, Report, Verdict, modules_at, table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.tools.verify.records import RankRun, Run
    from rankwise.tools.verify.runs import Script

_TIMED_OUT = 124
_UNSEEDED = Cause(
    "unseeded",
    "two runs on one rank already differ: something is drawn from a generator that is not seeded",
    "call torch.manual_seed(0), random.seed(0) and numpy.random.seed(0) before data and model are made",
)


def verify(
    script: Script, numbers_of_ranks: Sequence[int], *, as_is: bool, show: Callable[[str], None]
) -> Report:
    """Run the script on one rank and on each of ``numbers_of_ranks``, and compare.

    Args:
        script: what is verified.
        numbers_of_ranks: each at least 2.
        as_is: whether the script computes in its own precision, not in float64.
        show: receives what is being run, one line each.

    Raises:
        ConfigurationError: the working folder cannot be copied.
    """
    with tempfile.TemporaryDirectory(prefix="rankwise-verify-") as folder:
        return _Verification(script, Workspace(Path(folder), script), show).report(numbers_of_ranks, float64=not as_is)


class _Verification:
    """The runs of one script so far."""

    def __init__(self, script: Script, workspace: Workspace, show: Callable[[str], None]) -> None:
        self._script = script
        self._workspace = workspace
        self._show = show
        self._began = time.monotonic()
        self._runs: list[tuple[str, float]] = []
        self._notes: list[str] = []

    def report(self, numbers_of_ranks: Sequence[int], *, float64: bool) -> Report:
        """Run and compare; in the script's own precision if it does not run in float64."""
        one, _ = self._run("1 rank", 1, float64=float64)
        if float64 and not _has_ended_well(one):
            self._notes.append(f"the script fails in float64 ({_error(one)}): compared in its own precision")
            return self.report(numbers_of_ranks, float64=False)
        if not _has_ended_well(one):
            return self._finished([_no_verdict(n, f"it fails on one rank: {_error(one)}", one) for n in numbers_of_ranks])
        if not one.ranks[0].steps:
            why = "it takes no step of a torch optimizer"
            return self._finished([_no_verdict(n, why, one) for n in numbers_of_ranks])
        floor, unseeded = self._floor(one.ranks[0], float64=float64)
        if unseeded is not None:
            return self._finished([replace(unseeded, num_ranks=number) for number in numbers_of_ranks])
        verdicts: list[Verdict] = []
        for number in numbers_of_ranks:
            many, record = self._run(f"{number} ranks", number, float64=float64, limit=_limit(self._script, one))
            if float64 and not _has_ended_well(many) and self._runs_as_is(number, one):
                self._notes.append(f"the script fails on {number} ranks in float64: compared in its own precision")
                return self.report(numbers_of_ranks, float64=False)
            verdicts.append(self._verdict(one, many, record, floor, float64=float64))
        return self._finished(verdicts)

    def _finished(self, verdicts: Sequence[Verdict]) -> Report:
        return Report(
            script=shlex.join([self._script.target, *self._script.arguments]),
            dtype="its own precision" if any("own precision" in note for note in self._notes) else "float64",
            verdicts=tuple(verdicts),
            notes=tuple(self._notes),
            runs=tuple(self._runs),
            seconds=time.monotonic() - self._began,
        )

    def _run(
        self,
        words: str,
        num_ranks: int,
        *,
        float64: bool,
        permute: bool = False,
        join: tuple[str, int] | None = None,
        limit: float | None = None,
    ) -> tuple[Run, str]:
        self._show(f"running on {words}")
        run, record = self._workspace.run(
            num_ranks, float64=float64, permute=permute, join=join, limit_seconds=limit
        )
        self._runs.append((words, run.seconds))
        return run, record

    def _runs_as_is(self, number: int, one: Run) -> bool:
        run, _ = self._run(f"{number} ranks in its own precision", number, float64=False, limit=_limit(self._script, one))
        return _has_ended_well(run)

    def _floor(self, one: RankRun, *, float64: bool) -> tuple[Floor, Verdict | None]:
        """Measure the rounding of the script; also return a verdict if two runs on one rank differ."""
        again, _ = self._run("1 rank, each batch permuted", 1, float64=float64, permute=True)
        if not _has_ended_well(again):
            again, _ = self._run("1 rank once more", 1, float64=float64)
            floor = Floor(one.facts.dtype, None, "the script does not run with permuted batches")
        else:
            floor = compare.measured_floor(one, again.ranks[0]) if again.ranks else Floor(one.facts.dtype, None)
        if not again.ranks:
            return floor, None
        gap = compare.is_unseeded(one, again.ranks[0])
        if gap is None:
            return floor, None
        first = First(gap.step, gap.phase, gap.name, (0,), gap.error, 0.0)
        return floor, Verdict(num_ranks=1, status="differs", first=first, cause=_UNSEEDED)

    def _verdict(self, one: Run, many: Run, record: str, floor: Floor, *, float64: bool) -> Verdict:
        number = len(many.ranks)
        if not many.ranks or not all(rank.steps for rank in many.ranks):
            return _ended_early(one, many, number)
        found = list(causes.findings(one.ranks[0], many.ranks))
        has_data_mistake = any(finding.cause.key == "same samples" for finding in found)
        reference, is_joined, notes = one.ranks[0], False, list(_notes_on(floor))
        if not has_data_mistake and not _has_same_batches(reference, many.ranks):
            if not all(rank.batches_kept for rank in many.ranks):
                return _no_verdict(number, "the ranks' batches are too large, or cannot be saved, to be joined", many)
            if not reference.loaders:
                return self._compared(reference, many, floor, found, notes, is_joined=False)
            joined, _ = self._run(
                f"1 rank, on the batches of {number} ranks together", 1, float64=float64, join=(record, number)
            )
            if not _has_ended_well(joined) or not joined.ranks or not joined.ranks[0].steps:
                return _no_verdict(number, f"one rank cannot train on the ranks' batches: {_error(joined)}", joined)
            reference, is_joined = joined.ranks[0], True
            notes.append(
                f"each rank takes batches of its own: compared with one rank that takes those of {number} ranks together, "
                "with their learning rate"
            )
        return self._compared(reference, many, floor, found, notes, is_joined=is_joined)

    def _compared(
        self,
        reference: RankRun,
        many: Run,
        floor: Floor,
        found: list[causes.Finding],
        notes: list[str],
        *,
        is_joined: bool,
    ) -> Verdict:
        number = len(many.ranks)
        different = next(iter(compare.differences(reference, many.ranks, floor)), None)
        steps = min(len(reference.steps), *(len(rank.steps) for rank in many.ranks))
        shared = {"num_ranks": number, "num_steps": steps, "notes": tuple(notes)}
        rows = table(reference, many.ranks, floor)
        found = sorted(found, key=lambda finding: finding.step or steps + 1)
        if different is not None:
            gap = different.gap
            evidence = Evidence(gap, reference, many.ranks, is_joined)
            if is_joined and gap.phase == "forward" and _draws_otherwise(evidence):
                why = "the model draws random numbers in a way that one rank cannot repeat for the samples of several"
                return Verdict(**shared, status="not compared", why=why, rows=rows)
            # A mistake in the data explains what follows from it.
            explains = [one for one in found if 0 < one.step <= gap.step]
            cause = explains[0].cause if explains else causes.explain(evidence)
            first = First(gap.step, gap.phase, gap.name, gap.ranks, gap.error, different.multiple)
            also = tuple(one.cause for one in found if one.cause is not cause)
            modules = modules_at(reference, many.ranks, floor, gap.step)
            return Verdict(**shared, status="differs", first=first, cause=cause, also=also, rows=rows, modules=modules)
        modules = modules_at(reference, many.ranks, floor, steps)
        ended = _end_differs(reference, many)
        if found:
            cause = found[0].cause
            first = First(found[0].step, "data" if found[0].step else "files", cause.key, (), 0.0, 0.0)
            also = tuple(one.cause for one in found[1:])
            return Verdict(**shared, status="differs", first=first, cause=cause, also=also, rows=rows, modules=modules)
        if ended is not None:
            first = First(steps + 1, "steps", "the number of steps", (), 0.0, 0.0)
            return Verdict(**shared, status="differs", first=first, cause=ended, rows=rows, modules=modules)
        return Verdict(**shared, status="equal", rows=rows, modules=modules)


def _draws_otherwise(evidence: Evidence) -> bool:
    return any(call.drew and not call.drew_by_rows for step in evidence.theirs for call in step.calls)


def _has_same_batches(one: RankRun, many: Sequence[RankRun]) -> bool:
    """Return whether the first steps of N ranks together are those of one rank, or each rank computes all of it."""
    num_steps = min(len(one.steps), *(len(rank.steps) for rank in many))
    for number in range(min(num_steps, 2)):
        mine = one.steps[number]
        theirs = [rank.steps[number] for rank in many]
        if all(step.inputs == mine.inputs for step in theirs):
            continue
        if sum(step.rows for step in theirs) != mine.rows:
            return False
        loaded = sum((Counter(_loaded(step)) for step in theirs), Counter[int]())
        given = sum((Counter(step.inputs) for step in theirs), Counter[int]())
        # Batches that each rank cuts by itself are the same whole batch on all ranks.
        whole = all(Counter(_loaded(step)) == Counter(_loaded(mine)) for step in theirs)
        if Counter(mine.inputs) != given and Counter(_loaded(mine)) != loaded and not whole:
            return many[0].facts.uses_rankwise
    return True


def _loaded(step: object) -> list[int]:
    return [digest for batch in step.batches for digest in batch.digests]  # pyright: ignore


def _end_differs(reference: RankRun, many: Run) -> Cause | None:
    """Return why the ranks took fewer or more steps than one rank, or failed after them."""
    counts = [len(rank.steps) for rank in many.ranks]
    mine = len(reference.steps)
    evidence = tuple(f"rank {rank}: {count} steps" for rank, count in enumerate(counts))
    if len(set(counts)) > 1:
        return Cause(
            "local stop",
            f"ranks take different numbers of steps ({', '.join(map(str, counts))}): a rank decides to stop, or to skip a "
            "step, from its own value",
            "decide from a value that is equal on all ranks: rankwise.mean(loss, num_samples), or all_reduce it first",
            evidence,
            reference.steps[-1].step_line if reference.steps else "",
        )
    if many.exit_code == _TIMED_OUT:
        return Cause(
            "hang",
            f"the ranks stopped making progress after step {counts[0]}",
            "run it with `rankwise run` and look with `rankwise stacks` at what each rank waits for",
            evidence,
        )
    if not _has_ended_well(many):
        error = _error(many)
        return Cause(
            "failed", f"it runs on one rank and fails on {len(counts)} ranks: {error}", _advice(many) or "fix this error"
        )
    if counts[0] != mine:
        return Cause(
            "number of steps",
            f"one rank takes {mine} steps and {len(counts)} ranks take {counts[0]}",
            "divide the samples of one rank's epoch over the ranks, by rankwise.DataLoader(global_batch_size=...)",
            evidence,
        )
    return None


def _ended_early(one: Run, many: Run, number: int) -> Verdict:
    """Return the verdict on ranks that took no step."""
    if _has_ended_well(many):
        why = "some rank takes no step of a torch optimizer"
        return _no_verdict(number, why, many)
    cause = _end_differs(replace(one.ranks[0], steps=()), many)
    first = First(1, "steps", "the first step", (), 0.0, 0.0)
    return Verdict(num_ranks=number, status="differs", first=first, cause=cause)


def _has_ended_well(run: Run) -> bool:
    return run.exit_code == 0 and all(rank.end in {"script", "steps"} for rank in run.ranks)


def _error(run: Run) -> str:
    if run.exit_code == _TIMED_OUT:
        return "it took longer than the limit"
    errors = [rank.end for rank in run.ranks if rank.end not in {"", "script", "steps"}]
    if errors:
        return errors[0].splitlines()[0]
    last = run.output.strip().splitlines()
    return last[-1] if last else f"exit code {run.exit_code}"


def _advice(run: Run) -> str | None:
    """Return what rankwise's own error says to do."""
    for rank in run.ranks:
        _, found, rest = rank.end.partition("\n  do  ")
        if found:
            return " ".join(line.strip() for line in rest.splitlines())
    return None


def _no_verdict(number: int, why: str, run: Run) -> Verdict:
    tail = run.output.strip().splitlines()[-5:]
    return Verdict(num_ranks=number, status="not compared", why=why, notes=tuple(tail))


def _notes_on(floor: Floor) -> tuple[str, ...]:
    if floor.measured is None:
        return (f"rounding is assumed, not measured: {floor.why_assumed}",)
    return ()


def _limit(script: Script, one: Run) -> float:
    return min(script.timeout_seconds, max(LEAST_LIMIT_SECONDS, TIMES_SLOWER * one.seconds))
