# SPDX-License-Identifier: Apache-2.0
"""``rankwise submit``: its options and how they are translated. Writes no script and does not call Slurm itself."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.cli.arguments import Command, add_command, add_option, refuse_misplaced_count, values_of
from rankwise.launch.fork_server.entrypoint import find_target
from rankwise.launch.slurm import SAVE_SECONDS, JobOptions, batch_script, follow, submit

if TYPE_CHECKING:
    import argparse


INTERRUPTED = 130


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = partial(add_option, parser.add_argument, JobOptions)
    add("nodes", "number of machines (default: 1)", metavar="N")
    add("ranks_per_node", "ranks on each machine (default: one per GPU, else one)", metavar="N")
    add("gpus_per_node", "GPUs on each machine (default: 0)", metavar="N")
    add("cpus_per_rank", "CPU cores for each rank (default: 1)", metavar="N")
    add("time", "time limit, in sbatch's format: 2:00:00, 1-12 (days-hours)", metavar="LIMIT")
    add("partition", "partition to run in", metavar="NAME")
    add("account", "account to charge", metavar="NAME")
    add("job_name", "name of the job (default: the name of the script)", metavar="NAME", default=None)
    add("output", "the job's log (default: NAME-%%j.log; %%j is its number)", metavar="FILE")
    add(
        "save_seconds",
        f"notify the ranks to save this long before the time limit; 0: never (default: {SAVE_SECONDS})",
        metavar="S",
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


COMMAND = Command(
    name="submit",
    usage="rankwise submit [options] script.py [arguments]\n       rankwise submit [options] -m module [arguments]",
    help="run a script as a Slurm job",
    description="""\
Run a training script or a module as a Slurm job, and show its output until it ends.

Before the time limit, and if the job is preempted, the ranks save and stop at one step that all agree on, and
the job is requeued; it then continues with the next step. This needs a rankwise.Checkpointer that was
given the rankwise.DataLoader of the loop. Ctrl-C stops the output, not the job. The exit code is that of the job.""",
    epilog="""\
examples:
  rankwise submit --nodes 8 --gpus-per-node 4 --time 12:00:00 train.py --lr 0.1
  rankwise submit --nodes 2 --ranks-per-node 16 --partition cpu -m pkg.train
  rankwise submit --nodes 8 --time 1-0 --sbatch=--qos=high --dry-run train.py   show the script only""",
    add_options=add_options,
    execute=execute,
)
