# SPDX-License-Identifier: Apache-2.0
"""``rankwise submit``: its options and how they are translated. Writes no script and does not call Slurm itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.cli.arguments import add_command, refuse_misplaced_count, values_of
from rankwise.launch.fork_server.entrypoint import find_target
from rankwise.launch.slurm import SAVE_SECONDS, JobOptions, batch_script, follow, submit

if TYPE_CHECKING:
    import argparse

USAGE = "rankwise submit [options] script.py [arguments]\n       rankwise submit [options] -m module [arguments]"
DESCRIPTION = """\
Run a training script or a module as a Slurm job, and show its output until it ends.

Before the time limit, and if the job is preempted, the ranks save and stop at one step that all agree on, and
the job is requeued; it then continues with the next step. This needs a rankwise.Checkpointer that was
given the rankwise.DataLoader of the loop. Ctrl-C stops the output, not the job. The exit code is that of the job."""

EPILOG = """\
examples:
  rankwise submit --nodes 8 --gpus-per-node 4 --time 12:00:00 train.py --lr 0.1
  rankwise submit --nodes 2 --ranks-per-node 16 --partition cpu -m pkg.train
  rankwise submit --nodes 8 --time 1-0 --sbatch=--qos=high --dry-run train.py   show the script only"""

HELP = "run a script as a Slurm job"
INTERRUPTED = 130


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    for name, default, words in (
        ("--nodes", 1, "number of machines (default: 1)"),
        ("--ranks-per-node", None, "ranks on each machine (default: one per GPU, else one)"),
        ("--gpus-per-node", 0, "GPUs on each machine (default: 0)"),
        ("--cpus-per-rank", 1, "CPU cores for each rank (default: 1)"),
    ):
        parser.add_argument(name, type=int, default=default, metavar="N", help=words)
    parser.add_argument("--time", metavar="LIMIT", help="time limit, in sbatch's format: 2:00:00, 1-12 (days-hours)")
    parser.add_argument("--partition", metavar="NAME", help="partition to run in")
    parser.add_argument("--account", metavar="NAME", help="account to charge")
    parser.add_argument("--job-name", metavar="NAME", help="name of the job (default: the name of the script)")
    parser.add_argument("--output", metavar="FILE", help="the job's log (default: NAME-%%j.log; %%j is its number)")
    parser.add_argument(
        "--save-seconds",
        type=int,
        default=SAVE_SECONDS,
        metavar="S",
        help=f"notify the ranks to save this long before the time limit; 0: never (default: {SAVE_SECONDS})",
    )
    parser.add_argument(
        "--sbatch",
        dest="more",
        action="append",
        default=[],
        metavar="OPTION",
        help="another option of sbatch, as --sbatch=--qos=high; may be repeated",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script for sbatch and submit nothing")
    add_command(parser)


def execute(options: argparse.Namespace) -> int:
    """Check the command, submit it, follow the job, and return its exit code."""
    # Now rather than when the job starts, perhaps an hour later.
    refuse_misplaced_count(options, "rankwise submit", "--ranks-per-node", options.ranks_per_node)
    find_target(options.target, options.arguments, is_module=options.module)
    name = options.target.rpartition(".")[2] if options.module else Path(options.target).stem
    job = values_of(JobOptions, options, job_name=options.job_name or name)
    dashes = ["--"] if options.target.startswith("-") else []
    words = [*(["-m"] if options.module else []), *dashes, options.target, *options.arguments]
    script = batch_script(job, sys.executable, words)
    if options.dry_run:
        sys.stdout.write(script)
        return 0
    job_id = submit(script)
    sys.stderr.write(f"[rankwise] job {job_id} has been submitted\n")
    try:
        return follow(job_id, _say)
    except KeyboardInterrupt:
        sys.stderr.write(f"\n[rankwise] job {job_id} continues; to cancel it: scancel {job_id}\n")
        return INTERRUPTED


def _say(text: str) -> None:
    # The log has both output streams of the ranks, in one order.
    sys.stdout.write(text)
    sys.stdout.flush()
