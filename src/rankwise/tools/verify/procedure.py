# SPDX-License-Identifier: Apache-2.0
"""The order of the runs: a report on every number of ranks.

One rank, one rank with each batch permuted (the rounding of the script), N ranks; and where the script's batch size is
per rank, one rank on the batches of the N ranks together.
"""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.tools.verify import compare, conclude, mistakes, resumed
from rankwise.tools.verify.compare import Floor
from rankwise.tools.verify.runs import LEAST_LIMIT_SECONDS, TIMES_SLOWER, Workspace
from rankwise.tools.verify.verdict import Report
from rankwise.world.temporary_folders import make_temporary_folder, remove_temporary_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.tools.verify.records import RankRun, Run
    from rankwise.tools.verify.runs import Script
    from rankwise.tools.verify.verdict import Verdict


def verify(script: Script, numbers_of_ranks: Sequence[int], *, as_is: bool, show: Callable[[str], None]) -> Report:
    """Run the script on one rank and on each of ``numbers_of_ranks``, and compare.

    Args:
        script: what is verified.
        numbers_of_ranks: each at least 2.
        as_is: whether the script computes in its own precision, not in float64.
        show: receives what is being run, one line each.

    Raises:
        ConfigurationError: the working folder cannot be copied.
    """
    began = time.monotonic()
    folder, pid = make_temporary_folder("verify"), os.getpid()
    try:
        verification = _Verification(script, Workspace(folder, script), show)
        verdicts = None if as_is else verification.verdicts(numbers_of_ranks, float64=True)
        has_failed = verdicts is None and not as_is
        if verdicts is None:
            verdicts = verification.verdicts(numbers_of_ranks, float64=False) or []
    finally:
        # Ranks leave through here too.
        if os.getpid() == pid:
            remove_temporary_folder(folder)
    return Report(
        script=shlex.join([*["-m"] * script.is_module, script.target, *script.arguments]),
        dtype="its own precision" if as_is or has_failed else "float64",
        verdicts=tuple(verdicts),
        notes=tuple(verification.notes),
        runs=tuple(verification.runs),
        seconds=time.monotonic() - began,
    )


class _Verification:
    """The runs of one script so far."""

    def __init__(self, script: Script, workspace: Workspace, show: Callable[[str], None]) -> None:
        self._script = script
        self._workspace = workspace
        self._show = show
        self.runs: list[tuple[str, float]] = []
        self.notes: list[str] = []

    def verdicts(self, numbers_of_ranks: Sequence[int], *, float64: bool) -> list[Verdict] | None:
        """Run and compare; return ``None`` if the script fails in float64."""
        one, _ = self._run("1 rank", 1, float64=float64)
        if not conclude.has_ended_well(one):
            error = conclude.error_of(one)
            if float64:
                self.notes.append(f"the script fails in float64 ({error}): compared in its own precision")
                return None
            return [conclude.not_compared(n, f"it fails on one rank: {error}", one) for n in numbers_of_ranks]
        if not one.ranks or not one.ranks[0].steps:
            return [conclude.without_optimizer(number, one) for number in numbers_of_ranks]
        floor, unseeded = self._floor(one.ranks[0], float64=float64)
        if unseeded is not None:
            return [replace(unseeded, num_ranks=number) for number in numbers_of_ranks]
        found: list[Verdict] = []
        limit = _limit(self._script, one)
        for number in numbers_of_ranks:
            many, record = self._run(f"{number} ranks", number, float64=float64, limit=limit)
            has_failed = not conclude.has_ended_well(many) and many.exit_code != conclude.TIMED_OUT
            if float64 and has_failed and not conclude.has_diverged(many) and self._runs_as_is(number, limit):
                self.notes.append(f"the script fails on {number} ranks in float64: compared in its own precision")
                return None
            verdict = self._verdict(number, one.ranks[0], many, record, floor, float64=float64)
            if self._script.resumes and verdict.status == "equal":
                verdict = self._resumed(number, one.ranks[0], floor, float64=float64, limit=limit)
            found.append(verdict)
        return found

    def _runs_as_is(self, number: int, limit: float) -> bool:
        run, _ = self._run(f"{number} ranks in its own precision", number, float64=False, limit=limit)
        return conclude.has_ended_well(run)

    def _run(
        self,
        words: str,
        num_ranks: int,
        *,
        float64: bool,
        permute: bool = False,
        join: tuple[str, int] | None = None,
        limit: float | None = None,
        steps: int | None = None,
        continues: bool = False,
    ) -> tuple[Run, str]:
        self._show(f"running on {words}")
        run, record = self._workspace.run(
            num_ranks,
            float64=float64,
            permute=permute,
            join=join,
            limit_seconds=limit,
            steps=steps,
            continues=continues,
        )
        self.runs.append((words, run.seconds))
        return run, record

    def _floor(self, one: RankRun, *, float64: bool) -> tuple[Floor, Verdict | None]:
        """Measure the rounding of the script; also return a verdict if two runs on one rank differ."""
        again, _ = self._run("1 rank, each batch permuted", 1, float64=float64, permute=True)
        if conclude.has_ended_well(again) and again.ranks:
            return compare.measured_floor(one, again.ranks[0]), conclude.unseeded(one, again.ranks[0])
        floor = Floor(one.facts.dtype, None, "the script does not run with permuted batches")
        again, _ = self._run("1 rank once more", 1, float64=float64)
        return floor, conclude.unseeded(one, again.ranks[0]) if again.ranks else None

    def _resumed(self, number: int, one: RankRun, floor: Floor, *, float64: bool, limit: float) -> Verdict:
        half = max(1, len(one.steps) // 2)
        words = f"{number} ranks, interrupted after {half} step{'s' * (half > 1)}"
        self._run(words, number, float64=float64, limit=limit, steps=half)
        again, _ = self._run(f"{number} ranks, continued", number, float64=float64, limit=limit, continues=True)
        return resumed.compared(one, again, floor)

    def _verdict(self, number: int, one: RankRun, many: Run, record: str, floor: Floor, *, float64: bool) -> Verdict:
        if len(many.ranks) < (1 if self._script.auto else number) or not all(rank.steps for rank in many.ranks):
            return conclude.without_steps(number, one, many)
        found = [] if self._script.auto else list(mistakes.findings(one, many.ranks))
        notes = _notes_on(floor)
        is_unsharded = any(finding.cause.key == "same samples" for finding in found)
        # Under auto, rank zero takes the batches of one rank.
        is_promised = self._script.auto or (many.ranks[0].facts.uses_rankwise and not one.loaders)
        if is_unsharded or is_promised or conclude.has_same_batches(one, many.ranks):
            verdict = conclude.conclusion(one, many, floor, found, is_joined=False)
            return replace(verdict, notes=notes)
        if not one.loaders:
            why = "each rank takes batches of its own, and not from a DataLoader: they cannot be joined for one rank"
            return conclude.not_compared(number, why, many)
        if not all(rank.batches_kept for rank in many.ranks):
            why = "the batches of the ranks cannot be joined: they are too large, or cannot be saved"
            return conclude.not_compared(number, why, many)
        words = f"1 rank, on the batches of {number} ranks together"
        joined, _ = self._run(words, 1, float64=float64, join=(record, number))
        if not conclude.has_ended_well(joined) or not joined.ranks or not joined.ranks[0].steps:
            why = f"one rank cannot train on the batches of {number} ranks: {conclude.error_of(joined)}"
            return conclude.not_compared(number, why, joined)
        verdict = conclude.conclusion(joined.ranks[0], many, floor, found, is_joined=True)
        note = (
            f"each rank takes batches of its own: compared with one rank that takes those of {number} ranks together, "
            "with their learning rate"
        )
        return replace(verdict, notes=(*notes, note, *_scaled_settings(one, many.ranks[0])))


def _scaled_settings(one: RankRun, rank: RankRun) -> list[str]:
    """Return a note on each hyperparameter that the script multiplies by something that depends on the ranks."""
    pairs = zip(one.steps[0].hyperparameters, rank.steps[0].hyperparameters, strict=False)
    held = {key: (group[key], value) for group, theirs in pairs for key, value in theirs.items() if key in group}
    return [
        f"{key} is {value:g} on {rank.facts.world_size} ranks and {mine:g} on one, so the result of the script depends "
        f"on the number of ranks: intended if it scales {key} with the batch, as batches are {rank.facts.world_size} "
        "times as large"
        for key, (mine, value) in held.items()
        if mine != value and key != "initial_lr"
    ]


def _notes_on(floor: Floor) -> tuple[str, ...]:
    if floor.measured is None:
        return (f"rounding is assumed, not measured: {floor.why_assumed}",)
    if floor.last_step is not None:
        return (f"numbers are compared up to step {floor.last_step}: after it, rounding has grown too far",)
    return ()


def _limit(script: Script, one: Run) -> float:
    return min(script.timeout_seconds, max(LEAST_LIMIT_SECONDS, TIMES_SLOWER * one.seconds))
