# SPDX-License-Identifier: Apache-2.0
"""``rankwise stacks``: what every rank of a running job is doing, queried from another terminal."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError, fold_ranks
from rankwise.launch.inspect import control_socket

if TYPE_CHECKING:
    import argparse

    from rankwise.launch.inspect.control_socket import RunningJob

HELP = "show where every rank of a running job is"
DESCRIPTION = """\
Show what every rank of a job that runs on this machine is doing: its last collective, and its Python stack.

The job continues meanwhile. A rank that cannot answer is inspected from outside."""
EPILOG = """\
examples:
  rankwise stacks                your only job that `rankwise run` has started here
  rankwise stacks --job 4711     the job whose launcher is process 4711
  rankwise stacks --json         for a program"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--job", type=int, metavar="PID", help="process id of the launcher")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def execute(options: argparse.Namespace) -> int:
    """Ask the job, print what it answers, and return the exit code."""
    answer = control_socket.ask(_chosen(control_socket.jobs(), options.job), {"kind": "stacks"})
    sys.stdout.write(json.dumps(answer) + "\n" if options.json else answer["text"])
    return 0


def _chosen(jobs: list[RunningJob], pid: int | None) -> RunningJob:
    listed = "\n".join(f"{job.pid}: {fold_ranks(job.ranks)}: {shlex.join(job.command)}" for job in jobs)
    if not jobs:
        raise ConfigurationError(
            "You have no job on this machine that `rankwise run` has started.",
            do="run this on the job's machine, as the same user and with the same TMPDIR",
        )
    if pid is None and len(jobs) > 1:
        raise ConfigurationError(
            f"You have {len(jobs)} jobs on this machine.",
            evidence=listed,
            do=f"choose one: rankwise stacks --job {jobs[0].pid}",
        )
    for job in jobs:
        if pid in {None, job.pid}:
            return job
    raise ConfigurationError(f"Process {pid} is not the launcher of a job.", evidence=listed, do="choose one of these")
