# SPDX-License-Identifier: Apache-2.0
"""``rankwise run``: its options, and what they become. Starts nothing itself."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from rankwise.launch.start import LaunchOptions, launch
from rankwise.launch.target import find_module, find_script

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.launch.target import Target

DESCRIPTION = """\
Run a training script, or a module, on several ranks of this machine.

Each rank is a process of its own, which behaves as under `python script.py arguments`.
The exit code is that of the first rank to fail; its traceback is shown last."""

EPILOG = """\
examples:
  rankwise run train.py                  every GPU here, or one rank on a machine without GPUs
  rankwise run -n 4 train.py --epochs 3  four ranks; what follows the script is the script's
  rankwise run -n 2 -m pkg.train         a module, as `python -m pkg.train` runs it

what ranks write:
  Lines on stdout come through as they are, lines on stderr with the rank in front.
  With one rank, nothing is touched. Rank 0 writes to a terminal itself: progress bars work.
  With --log-dir, the terminal shows rank 0 only, and every rank has its files.
  stdin is empty when there are several ranks."""


HELP = "run a script on several ranks of this machine"


def add_to(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command to those of ``rankwise``."""
    parser = add_parser(
        "run",
        help=HELP,
        description=DESCRIPTION,
        epilog=EPILOG,
        usage="rankwise run [options] script.py [arguments]\n       rankwise run [options] -m module [arguments]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n",
        dest="num_ranks",
        type=int,
        metavar="N",
        help="how many ranks (default: one per GPU, else one)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu"),
        default="auto",
        help="cpu hides the GPUs from the ranks (default: auto, a GPU each where there are GPUs)",
    )
    parser.add_argument("--log-dir", metavar="DIR", help="write DIR/rank-0.out, DIR/rank-0.err and so on")
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="R",
        help="start all ranks anew after a failure, at most R times (default: 0)",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="what follows is a module")
    parser.add_argument("target", metavar="script.py | module", help="what every rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to it")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Check the command, run it, and return the exit code."""
    launch_options = LaunchOptions(
        num_ranks=options.num_ranks,
        device=options.device,
        log_dir=options.log_dir,
        max_restarts=options.max_restarts,
    )
    target: Target
    if options.module:
        target = find_module(options.target, options.arguments)
    else:
        target = find_script(options.target, options.arguments)
    return launch(target, launch_options, _say)


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
