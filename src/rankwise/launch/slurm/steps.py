# SPDX-License-Identifier: Apache-2.0
"""Handing a batch script to Slurm, and following the job to its end through every requeue.

Calls sbatch and scontrol; writes no script itself. Never prints. Imported by the command line.
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError, LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LOOK_SECONDS = 1.0
"""How often the job is looked at: scontrol asks the one controller of the cluster."""
ASKING_SECONDS = 120.0
"""How long a controller that does not answer is asked again: it may be restarting."""
ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "TIMEOUT",
}
"""States that a job does not leave by itself."""


def submit(script: str) -> str:
    """Hand a batch script to Slurm and return the number of the job.

    Raises:
        ConfigurationError: there is no sbatch here.
        LaunchError: sbatch refused; its own words are the evidence.
    """
    try:
        done = _run(["sbatch", "--parsable"], script)
    except FileNotFoundError as error:
        raise ConfigurationError(
            "There is no sbatch on this machine.",
            do="run the command on a login node of the cluster, or `rankwise run` to start ranks here",
        ) from error
    if done.returncode != 0:
        raise LaunchError(
            "Slurm did not take the job.",
            evidence=(done.stderr or done.stdout).strip(),
            do="sinfo shows the partitions and their limits; --dry-run shows the script",
        )
    # Number;cluster where there are several clusters.
    return done.stdout.strip().partition(";")[0]


def follow(job_id: str, show: Callable[[str], None]) -> int:
    """Show what a job writes, and its state whenever that changes, until it ends; return its exit code.

    A job that goes back into the queue is followed on.

    Args:
        job_id: as :func:`submit` returned it.
        show: shows text to the person.

    Returns:
        The job's exit code; 128 and the signal's number where a signal ended it; 1 where it ended badly with code 0.

    Raises:
        LaunchError: Slurm does not tell of the job any more.
    """
    log = _Log()
    state_said = ""
    while True:
        job = _look(job_id)
        state = job["JobState"]
        log.show(Path(job["StdOut"]), show)
        if state != state_said and state in {"PENDING", "RUNNING", *ENDED}:
            state_said = state
            reason = "" if job["Reason"] == "None" else f" ({job['Reason']})"
            show(f"[rankwise] job {job_id}: {state}{reason}\n")
        if state in ENDED or (state == "PREEMPTED" and job.get("Requeue") == "0"):
            return exit_code(state, job["ExitCode"])
        time.sleep(LOOK_SECONDS)


def exit_code(state: str, told: str) -> int:
    """Return the exit code for the shell of a job that ended.

    Args:
        state: ``JobState`` of scontrol.
        told: ``ExitCode`` of scontrol: ``code:signal``.
    """
    code, _, signal = told.partition(":")
    if int(code):
        return int(code)
    if int(signal or 0):
        return 128 + int(signal)
    return 0 if state == "COMPLETED" else 1


def fields_of(line: str) -> dict[str, str]:
    """Return what ``scontrol show job --oneliner`` says of a job, by name."""
    return dict(re.findall(r"(\S+?)=(.*?)(?=\s+[\w/:]+=|\s*$)", line))


class _Log:
    """The job's output file, as far as it has been shown."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def show(self, path: Path, show: Callable[[str], None]) -> None:
        try:
            with path.open("rb") as file:
                file.seek(self._num_bytes)
                new = file.read()
        except OSError:
            # Not there yet, or not on this machine; the state is still told.
            return
        self._num_bytes += len(new)
        if new:
            show(new.decode(errors="replace"))


def _look(job_id: str) -> dict[str, str]:
    deadline = time.monotonic() + ASKING_SECONDS
    while True:
        done = _run(["scontrol", "show", "job", job_id, "--oneliner"])
        if done.returncode == 0 and done.stdout.strip():
            return fields_of(done.stdout.strip())
        is_gone = "Invalid job id" in done.stderr
        if is_gone or time.monotonic() > deadline:
            raise LaunchError(
                f"Slurm does not tell of job {job_id} any more.",
                evidence=done.stderr.strip(),
                do=f"sacct -j {job_id}" if is_gone else f"squeue -j {job_id}",
            )
        time.sleep(LOOK_SECONDS)


def _run(argv: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)  # noqa: S603 - no shell
