# SPDX-License-Identifier: Apache-2.0
"""Runs the script, each time in a process and a copy of the working folder of its own, and reads what it recorded."""

from __future__ import annotations

import contextlib
import os
import random
import select
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
from rankwise.verify.conclude import TIMED_OUT
from rankwise.verify.loaders import StepsTaken
from rankwise.verify.recorder import Recorder
from rankwise.verify.records import Run, assembled, read
from rankwise.verify.script_files import Copies
from rankwise.world import processes
from rankwise.world.environments.process import make_cublas_deterministic, read_process

if TYPE_CHECKING:
    from rankwise.launch.fork_server.entrypoint import Module, Target
    from rankwise.launch.fork_server.entrypoint import Script as ScriptFile
    from rankwise.verify.records import Plan

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
