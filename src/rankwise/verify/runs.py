# SPDX-License-Identifier: Apache-2.0
"""The runs of the script and their order: a report on every number of ranks.

One rank, one rank with each batch permuted (the rounding of the script), N ranks; and where the script's batch size is
per rank, one rank on the batches of the N ranks together. Each run has a process and a copy of the working folder of
its own, and is read from what it recorded.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import shlex
import signal
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

import torch

from rankwise.auto.replacing import one_by_one
from rankwise.auto.script import AutoScript
from rankwise.errors import RankwiseError
from rankwise.launch.fork_server.entrypoint import find_target, run_as_main
from rankwise.launch.options import LaunchOptions
from rankwise.launch.report.failure_report import TerminalReporter
from rankwise.launch.start import launch
from rankwise.verify import compare, conclude, mistakes
from rankwise.verify.compare import Floor
from rankwise.verify.conclude import TIMED_OUT, Report
from rankwise.verify.loaders import StepsTaken
from rankwise.verify.recorder import Recorder
from rankwise.verify.records import Plan, Run, assembled, read
from rankwise.verify.script_files import Copies
from rankwise.world import processes
from rankwise.world.environments.process import make_cublas_deterministic, read_process
from rankwise.world.processes import make_temporary_folder, remove_temporary_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.launch.fork_server.entrypoint import Module, Target
    from rankwise.launch.fork_server.entrypoint import Script as ScriptFile
    from rankwise.verify.conclude import Verdict
    from rankwise.verify.records import RankRun


NUM_LAST_LINES = 30
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end all runs."""
_STOP_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """What is verified."""

    target: str
    is_module: bool
    arguments: tuple[str, ...]
    device: Literal["auto", "cpu"]
    steps: int
    resumes: bool
    """Whether a run on several ranks is also interrupted and continued."""
    auto: bool
    """Whether rank zero runs it and the others serve, as with ``rankwise run --auto``."""
    timeout_seconds: float
    """Limit of one run."""


class Workspace:
    """The temporary folder of all runs; each run has a number."""

    def __init__(self, folder: Path, script: Script) -> None:
        self._folder = folder
        self._script = script
        self._num_runs = 0
        self._copies: Copies | None = None

    def run(self, plan: Plan, limit_seconds: float, *, continues: bool = False) -> Run:
        """Run the script.

        Args:
            plan: how it is recorded; the folders are filled in.
            limit_seconds: after this time the run is ended.
            continues: whether it runs in the folder of the run before it.
        """
        self._num_runs += 1
        here = self._folder / f"run-{self._num_runs}"
        here.mkdir(parents=True)
        if self._copies is None or not continues:
            self._copies = Copies.of(self._script.target, here / "work", is_module=self._script.is_module)
        plan = replace(plan, record=str(here / "record"), root=str(self._copies.root), origin=str(Path.cwd()))
        began = time.monotonic()
        exit_code = _run(self._script, self._copies, plan, here / "output", limit_seconds)
        seconds = time.monotonic() - began
        ranks = [rank for number in range(plan.num_scripts) if (rank := read(plan.path(number))) is not None]
        lines = (here / "output").read_text(encoding="utf-8", errors="replace").splitlines()
        return Run(assembled(ranks), exit_code, "\n".join(lines[-NUM_LAST_LINES:]), seconds, plan.record)


def _run(script: Script, copies: Copies, plan: Plan, output: Path, limit_seconds: float) -> int:
    """Run the launcher in a fork of this process, which has torch in memory and no threads; return its exit code.

    Returns in this process only: a rank leaves through here with SystemExit, as it leaves ``launch``.
    """
    pid = os.fork()
    if not pid:
        processes.die_with_parent()
        for number in STOPS:
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.chdir(copies.working_folder)
        _redirect(output)
        _launch(script, copies.target, plan)
    descriptor = os.pidfd_open(pid)
    try:
        if not select.select([descriptor], [], [], limit_seconds)[0]:
            _end(pid, descriptor)
            os.waitpid(pid, 0)
            return TIMED_OUT
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:
        _end(pid, descriptor)
        raise
    finally:
        os.close(descriptor)


def _redirect(output: Path) -> None:
    for path, flags, streams in (
        (os.devnull, os.O_RDONLY, (0,)),
        (str(output), os.O_WRONLY | os.O_CREAT | os.O_APPEND, (1, 2)),
    ):
        descriptor = os.open(path, flags)
        for stream in streams:
            os.dup2(descriptor, stream)
        os.close(descriptor)


def _end(pid: int, descriptor: int) -> None:
    """End the launcher, which ends its ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        if select.select([descriptor], [], [], _STOP_SECONDS)[0]:
            return


def _launch(script: Script, target: str, plan: Plan) -> NoReturn:
    """Run the ranks, and end this process with their exit code; a rank leaves with SystemExit."""
    # As in a new process: forks of one process would otherwise all draw the same unseeded numbers.
    torch.default_generator.seed()
    random.seed()
    # Read by cuBLAS when a rank first uses it; without it, equal products may differ in their last bits.
    make_cublas_deterministic()
    found = find_target(target, script.arguments, is_module=script.is_module)
    # The recorder is installed last: it sees the calls that the script makes, not their parts.
    run: Target = Recorded(found, plan)
    if plan.auto:
        # The script is given no local rank.
        run = AutoScript(Recorded(replace(found, local_rank_option=None), plan), splits_always=True)
    try:
        exit_code = launch(run, LaunchOptions(num_ranks=plan.num_ranks, device=script.device), TerminalReporter())
    except RankwiseError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        exit_code = 2
    sys.stderr.flush()
    os._exit(exit_code)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A script that is recorded while it runs: what each rank runs."""

    target: ScriptFile | Module
    plan: Plan

    def __str__(self) -> str:
        return str(self.target)

    @property
    def names(self) -> frozenset[str]:
        """The names that the script uses."""
        return self.target.names

    def run(self) -> None:
        """Record the script as it runs."""
        place = None if self.plan.auto else read_process()
        recorder = Recorder(self.plan, 0 if place is None else place.rank)
        recorder.install()
        how, failed = "script", None
        try:
            with one_by_one():
                run_as_main(self.target)
        except StepsTaken:
            how = "steps"
        except SystemExit as error:
            how = "script" if error.code in {None, 0} else f"SystemExit: {error.code}"
            raise
        except BaseException as error:
            how, failed = "".join(traceback.format_exception_only(error)).rstrip(), error
            raise
        finally:
            recorder.finish(how, failed)


LEAST_LIMIT_SECONDS = 60.0
"""How long a run on several ranks may take at least."""
TIMES_SLOWER = 20.0
"""And at most this many times as long as the run on one rank."""


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
        dtype = "its own precision" if verdicts is None else "float64"
        if verdicts is None:
            verdicts = verification.verdicts(numbers_of_ranks, float64=False) or []
    finally:
        # Ranks leave through here too.
        if os.getpid() == pid:
            remove_temporary_folder(folder)
    return Report(
        script=shlex.join([*["-m"] * script.is_module, script.target, *script.arguments]),
        dtype=dtype,
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
        self._limit = script.timeout_seconds
        self.runs: list[tuple[str, float]] = []
        self.notes: list[str] = []

    def verdicts(self, numbers_of_ranks: Sequence[int], *, float64: bool) -> list[Verdict] | None:
        """Run and compare; return ``None`` if the script fails in float64."""
        plan = Plan(steps=self._script.steps, float64=float64)
        one = self._run("1 rank", plan)
        if not conclude.has_ended_well(one):
            error = conclude.error_of(one)
            if float64:
                self.notes.append(f"the script fails in float64 ({error}): compared in its own precision")
                return None
            return [conclude.not_compared(n, f"it fails on one rank: {error}", one) for n in numbers_of_ranks]
        if not one.ranks or not one.ranks[0].steps:
            return [conclude.without_optimizer(number, one) for number in numbers_of_ranks]
        floor, unseeded = self._floor(one.ranks[0], plan)
        if unseeded is not None:
            return [replace(unseeded, num_ranks=number) for number in numbers_of_ranks]
        self._limit = min(self._limit, max(LEAST_LIMIT_SECONDS, TIMES_SLOWER * one.seconds))
        found: list[Verdict] = []
        for number in numbers_of_ranks:
            several = replace(plan, num_ranks=number, auto=self._script.auto)
            many = self._run(f"{number} ranks", several)
            has_failed = not conclude.has_ended_well(many) and many.exit_code != conclude.TIMED_OUT
            if float64 and has_failed and not conclude.has_diverged(many):
                as_is = self._run(f"{number} ranks in its own precision", replace(several, float64=False))
                if conclude.has_ended_well(as_is):
                    self.notes.append(f"the script fails on {number} ranks in float64: compared in its own precision")
                    return None
            verdict = self._verdict(one.ranks[0], many, floor, several)
            if self._script.resumes and verdict.status == "equal":
                verdict = self._resumed(one.ranks[0], floor, several)
            found.append(replace(verdict, num_ranks=number))
        return found

    def _run(self, words: str, plan: Plan, *, continues: bool = False) -> Run:
        self._show(f"running on {words}")
        run = self._workspace.run(plan, self._limit, continues=continues)
        self.runs.append((words, run.seconds))
        return run

    def _floor(self, one: RankRun, plan: Plan) -> tuple[Floor, Verdict | None]:
        """Measure the rounding of the script; also return a verdict if two runs on one rank differ."""
        again = self._run("1 rank, each batch permuted", replace(plan, permute=True))
        if conclude.has_ended_well(again) and again.ranks:
            return compare.measured_floor(one, again.ranks[0]), conclude.unseeded(one, again.ranks[0])
        floor = Floor(one.facts.dtype, None, "the script does not run with permuted batches")
        again = self._run("1 rank once more", plan)
        return floor, conclude.unseeded(one, again.ranks[0]) if again.ranks else None

    def _resumed(self, one: RankRun, floor: Floor, plan: Plan) -> Verdict:
        half = max(1, len(one.steps) // 2)
        words = f"{plan.num_ranks} ranks, interrupted after {half} step{'s' * (half > 1)}"
        self._run(words, replace(plan, steps=half))
        again = self._run(f"{plan.num_ranks} ranks, continued", plan, continues=True)
        return conclude.resumed_verdict(one, again, floor)

    def _verdict(self, one: RankRun, many: Run, floor: Floor, plan: Plan) -> Verdict:
        number = plan.num_ranks
        if len(many.ranks) < plan.num_scripts or not all(rank.steps for rank in many.ranks):
            return conclude.without_steps(number, one, many)
        found = [] if plan.auto else list(mistakes.findings(one, many.ranks))
        is_unsharded = any(finding.cause.key == "same samples" for finding in found)
        # Under auto, rank zero takes the batches of one rank.
        is_promised = plan.auto or (many.ranks[0].facts.uses_rankwise and not one.loaders)
        if is_unsharded or is_promised or conclude.has_same_batches(one, many.ranks):
            verdict = conclude.conclusion(one, many, floor, found, is_joined=False)
            return replace(verdict, notes=_notes_on(floor))
        if not one.loaders:
            why = "each rank takes batches of its own, and not from a DataLoader: they cannot be joined for one rank"
            return conclude.not_compared(number, why, many)
        if not all(rank.batches_kept for rank in many.ranks):
            why = "the batches of the ranks cannot be joined: they are too large, or cannot be saved"
            return conclude.not_compared(number, why, many)
        words = f"1 rank, on the batches of {number} ranks together"
        joined = self._run(words, Plan(steps=plan.steps, float64=plan.float64, join=many))
        if not conclude.has_ended_well(joined) or not joined.ranks or not joined.ranks[0].steps:
            why = f"one rank cannot train on the batches of {number} ranks: {conclude.error_of(joined)}"
            return conclude.not_compared(number, why, joined)
        verdict = conclude.conclusion(joined.ranks[0], many, floor, found, is_joined=True)
        note = (
            f"each rank takes batches of its own: compared with one rank that takes those of {number} ranks together, "
            "with their learning rate"
        )
        return replace(verdict, notes=(*_notes_on(floor), note, *_scaled_settings(one, many.ranks[0], number)))


def _scaled_settings(one: RankRun, rank: RankRun, number: int) -> list[str]:
    """Return a note on each hyperparameter that the script multiplies by something that depends on the ranks."""
    pairs = zip(one.steps[0].hyperparameters, rank.steps[0].hyperparameters, strict=False)
    held = {key: (group[key], value) for group, theirs in pairs for key, value in theirs.items() if key in group}
    return [
        f"{key} is {value:g} on {number} ranks and {mine:g} on one, so the result of the script depends on the number "
        f"of ranks: intended if it scales {key} with the batch, as batches are {number} times as large"
        for key, (mine, value) in held.items()
        if mine != value and key != "initial_lr"
    ]


def _notes_on(floor: Floor) -> tuple[str, ...]:
    if floor.measured is None:
        return (f"rounding is assumed, not measured: {floor.why_assumed}",)
    if floor.last_step is not None:
        return (f"numbers are compared up to step {floor.last_step}: after it, rounding has grown too far",)
    return ()
