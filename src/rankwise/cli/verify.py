# SPDX-License-Identifier: Apache-2.0
"""``rankwise verify``: compare N ranks of a script with one rank, and name the first difference."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import NoReturn

from rankwise.cli.arguments import Command, add_command, refuse_misplaced_count
from rankwise.launch.fork_server.entrypoint import find_target


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "-n",
        dest="numbers_of_ranks",
        type=_numbers,
        metavar="N,...",
        help="numbers of ranks to compare with one (default: 2)",
    )
    parser.add_argument("--steps", type=_positive, default=20, help="optimizer steps to compare (default: 20)")
    parser.add_argument(
        "--auto", action="store_true", help="run a script for one device on N ranks as `rankwise run --auto` does"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="also interrupt the run on N ranks halfway, run the script again, and compare what it continues",
    )
    parser.add_argument(
        "--as-is", action="store_true", help="compute in the script's own precision (default: in float64)"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu"),
        default="auto",
        help="cpu hides the GPUs from the ranks (default: auto, one GPU per rank if there are GPUs)",
    )
    parser.add_argument(
        "--timeout",
        dest="timeout_seconds",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="limit of one run (default: 600)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - for standard output")
    parser.add_argument("--html", metavar="FILE", help="write the report as one page")
    add_command(parser)


def execute(options: argparse.Namespace) -> int:
    """Run the script, print the report, and return the exit code."""
    # A mistake in the command is reported before torch is imported.
    refuse_misplaced_count(options, "rankwise verify", "-n", options.numbers_of_ranks)
    find_target(options.target, options.arguments, is_module=options.module)
    from rankwise.verify.report import page_of, text_of  # noqa: PLC0415
    from rankwise.verify.runs import (  # noqa: PLC0415
        STOPS,
        Script,
        verify,
    )

    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    script = Script(
        target=options.target,
        is_module=options.module,
        arguments=tuple(options.arguments),
        device=options.device,
        steps=options.steps,
        resumes=options.resume,
        auto=options.auto,
        timeout_seconds=options.timeout_seconds,
    )
    report = verify(script, options.numbers_of_ranks or (2,), as_is=options.as_is, show=_show)
    if options.json == "-":
        sys.stdout.write(json.dumps(report.content()) + "\n")
    else:
        sys.stdout.write(text_of(report))
    if options.json not in {None, "-"}:
        Path(options.json).write_text(json.dumps(report.content(), indent=1) + "\n", encoding="utf-8")
    if options.html is not None:
        Path(options.html).write_text(page_of(report), encoding="utf-8")
    return report.exit_code


def _stop(number: int, _: object) -> NoReturn:
    _show(f"{signal.Signals(number).name}: ending the run; its files are removed")
    raise SystemExit(128 + number)


def _show(line: str) -> None:
    sys.stderr.write(f"[rankwise] {line}\n")


def _numbers(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 1 for word in words):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers of ranks, such as 2 or 2,3; each at least 2"
        )
    return tuple(dict.fromkeys(int(word) for word in words))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps, at least 1")
    return int(text)


COMMAND = Command(
    name="verify",
    usage="rankwise verify [options] script.py [arguments]\n       rankwise verify [options] -m module [arguments]",
    help="show that N ranks of a script compute what one rank computes, or where they first differ and why",
    description="""\
Run a training script on one rank and on N, unchanged, and compare each step: samples, parameters, the
output of each module, gradients, learning rates, updates and buffers. The first difference is reported
with its cause and fix.

Each run works in a copy of the working folder. Exit code: 0 if equal, 1 if they differ, 2 if they could
not be compared.""",
    epilog="""\
examples:
  rankwise verify train.py                     one rank and two, 20 steps of the optimizer
  rankwise verify -n 2,3 --steps 50 train.py   one rank, two and three
  rankwise verify --html report.html train.py  also a page with all steps and modules""",
    add_options=add_options,
    execute=execute,
)
