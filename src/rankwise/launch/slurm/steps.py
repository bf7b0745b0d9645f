# SPDX-License-Identifier: Apache-2.0
"""Submitting a batch script to Slurm, and following the job to its end through every requeue.

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
"""How often the job is polled: scontrol queries the one controller of the cluster."""
ASKING_SECONDS = 120.0
"""How long to retry a controller that does not answer: it may be restarting."""
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
"""Final states of a job."""


def submit(script: str) -> str:
    """Submit a batch script to Slurm and return the number of the job.

    Raises:
        ConfigurationError: there is no sbatch here.
        LaunchError: sbatch failed; its error is the evidence.
    """
    try:
        done = _run(["sbatch", "--parsable"], script)
    except FileNotFoundError as error:
        raise ConfigurationError(
            "sbatch was not found on this machine.",
            do="run the command on a login node of the cluster, or `rankwise run` to start ranks here",
        ) from error
    if done.returncode != 0:
        raise LaunchError(
            "Slurm did not accept the job.",
            evidence=(done.stderr or done.stdout).strip(),
            do="sinfo shows the partitions and their limits; --dry-run shows the script",
        )
    # Number;cluster if there are several clusters.
    return done.stdout.strip().partition(";")[0]


def follow(job_id: str, show: Callable[[str], None]) -> int:
    """Show a job's output, and its state on every change, until it ends; return its exit code.

    A requeued job is followed further.

    Args:
        job_id: as :func:`submit` returned it.
        show: shows text to the user.

    Returns:
        The job's exit code; 128 plus the signal's number if a signal ended it; 1 if it failed with code 0.

    Raises:
        LaunchError: Slurm no longer knows the job, or does not answer.
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
    """Return the exit code for the shell of a job that ended, from ``JobState`` and ``ExitCode`` of scontrol."""
    code, _, signal = told.partition(":")
    if int(code):
        return int(code)
    if int(signal or 0):
        return 128 + int(signal)
    return 0 if state == "COMPLETED" else 1


def fields_of(line: str) -> dict[str, str]:
    """Return the fields of ``scontrol show job --oneliner``, by name."""
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
            # Not there yet, or not on this machine; the state is still shown.
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
                f"Slurm no longer reports job {job_id}.",
                evidence=done.stderr.strip(),
                do=f"sacct -j {job_id}" if is_gone else f"squeue -j {job_id}",
            )
        time.sleep(LOOK_SECONDS)


def _run(argv: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)  # noqa: S603 - no shell
