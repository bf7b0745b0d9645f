# SPDX-License-Identifier: Apache-2.0
"""``rankwise stacks``: what every rank of a running job is doing, queried from another terminal."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from rankwise.launch.inspect import control_socket

if TYPE_CHECKING:
    import argparse

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
    answer = control_socket.ask(control_socket.only_job(options.job, "stacks"), {"kind": "stacks"})
    sys.stdout.write(json.dumps(answer) + "\n" if options.json else answer["text"])
    return 0
