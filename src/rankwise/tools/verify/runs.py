# SPDX-License-Identifier: Apache-2.0
"""Runs the script, each time in a process and a copy of the working folder of its own, and reads what it recorded."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rankwise.launch.fork_server import descendants
from rankwise.tools.verify.conclude import TIMED_OUT
from rankwise.tools.verify.rank import RunOrder, launch_ranks
from rankwise.tools.verify.recorder import Plan
from rankwise.tools.verify.records import Run, assembled, read
from rankwise.tools.verify.working_copy import copy_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_LAST_LINES = 30
LEAST_LIMIT_SECONDS = 60.0
"""How long a run on several ranks may take at least."""
TIMES_SLOWER = 20.0
"""And at most this many times as long as the run on one rank."""
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
        self._copies: tuple[Path, Path, str] | None = None

    def run(
        self,
        num_ranks: int,
        *,
        float64: bool,
        permute: bool = False,
        join: tuple[str, int] | None = None,
        limit_seconds: float | None = None,
        steps: int | None = None,
        continues: bool = False,
    ) -> tuple[Run, str]:
        """Run the script; return what its ranks recorded, and the folder of the records.

        Args:
            num_ranks: how many ranks.
            float64: whether it computes in float64.
            permute: whether the rows of each batch are in another order.
            join: the records of an earlier run and its number of ranks, whose batches are taken together.
            limit_seconds: after this time the run is ended; ``None``: the script's limit.
            steps: after so many it is ended; ``None``: as many as are compared.
            continues: whether it runs in the folder of the run before it.
        """
        self._num_runs += 1
        here = self._folder / f"run-{self._num_runs}"
        record = here / "record"
        if self._copies is None or not continues:
            self._copies = _copies(self._script, here / "work")
        working, root, target = self._copies
        plan = Plan(
            record=str(record),
            working_folder=str(root),
            origin=str(Path.cwd()),
            steps=steps or self._script.steps,
            float64=float64,
            permute=permute,
            keep=num_ranks > 1 and not self._script.auto,
            join=None if join is None else join[0],
            num_joined=0 if join is None else join[1],
        )
        order = RunOrder(
            target,
            self._script.is_module,
            self._script.arguments,
            num_ranks,
            self._script.device,
            plan,
            self._script.auto,
        )
        began = time.monotonic()
        here.mkdir(parents=True, exist_ok=True)
        exit_code = _run(order, working, here / "output", limit_seconds or self._script.timeout_seconds)
        seconds = time.monotonic() - began
        found = [read(plan.path(rank)) for rank in range(1 if self._script.auto else num_ranks)]
        ranks = tuple(rank for rank in found if rank is not None)
        return Run(assembled(ranks), exit_code, _last_lines(here / "output"), seconds), str(record)


def _copies(script: Script, folder: Path) -> tuple[Path, Path, str]:
    """Copy the working folder, and the script's own if it is elsewhere.

    Returns:
        The working folder's copy, the folder that holds all copies, and the script's path.
    """
    here = Path.cwd()
    copy_folder(here, folder / here.name)
    if script.is_module or not Path(script.target).absolute().is_file():
        return folder / here.name, folder / here.name, script.target
    path = Path(os.path.normpath(Path(script.target).absolute()))
    if path.is_relative_to(here):
        return folder / here.name, folder / here.name, str(path.relative_to(here))
    copy_folder(path.parent, folder / "script" / path.parent.name)
    return folder / here.name, folder, str(folder / "script" / path.parent.name / path.name)


def _run(order: RunOrder, working: Path, output: Path, limit_seconds: float) -> int:
    """Run the launcher in a fork of this process, which has torch in memory and no threads; return its exit code.

    Returns in this process only: a rank leaves through here with SystemExit, as it leaves ``launch``.
    """
    pid = os.fork()
    if not pid:
        descendants.die_with_parent()
        for number in STOPS:
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.chdir(working)
        _redirect(output)
        launch_ranks(order)
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


def _last_lines(output: Path) -> str:
    lines: Sequence[str] = output.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-NUM_LAST_LINES:])
