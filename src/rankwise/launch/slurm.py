# SPDX-License-Identifier: Apache-2.0
"""Slurm jobs: the batch script as text, submitting it, and following the job to its end through every requeue.

Calls sbatch and scontrol. Never prints, reads no variable. Imported by the command line.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Sequence  # noqa: TC003 - looked up when options are built from fields
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError, LaunchError
from rankwise.health.preemption import STOPPED_EXIT_CODE
from rankwise.launch.job_size import JobSize

if TYPE_CHECKING:
    from collections.abc import Callable

SLACK_SECONDS = 60
"""How much earlier than requested Slurm may send its signal (sbatch(1), ``--signal``)."""

OWN_WORDS = {
    "nodes": "--nodes",
    "time": "--time",
    "partition": "--partition",
    "account": "--account",
    "job-name": "--job-name",
    "output": "--output",
    "gpus-per-node": "--gpus-per-node",
    "cpus-per-task": "--cpus-per-rank",
    "ntasks-per-node": "--ranks-per-node",
    "signal": "--save-seconds",
}
"""The option of ``rankwise submit`` that sets an sbatch directive, if there is one."""
SHORT_NAMES = {
    "N": "nodes",
    "t": "time",
    "p": "partition",
    "A": "account",
    "J": "job-name",
    "o": "output",
    "c": "cpus-per-task",
}
"""The directives that sbatch's short options set, of those that rankwise writes."""
OPPOSITES = {"no-requeue": "requeue"}
OWN_TASK = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
"""One task of an array: the SLURM_JOB_ID of one of them is that of the whole array."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions(JobSize):
    """The options of a Slurm job. ``None`` leaves the choice to the cluster."""

    time: str | None = None
    """In sbatch's format: ``2:00:00``."""
    partition: str | None = None
    account: str | None = None
    output: str | None = None
    """The job's log file, with sbatch's patterns; ``NAME-%j.log`` by default."""
    more: Sequence[str] = ()
    """Further options of sbatch, each complete: ``--qos=high``."""

    def __post_init__(self) -> None:
        JobSize.__post_init__(self)  # super() does not work in a class with slots that is made by dataclass()
        self._check_words()
        self._check_more()
        self._check_time()

    @property
    def is_array(self) -> bool:
        """Whether several jobs are submitted at once, each with a number of its own."""
        return any(directive_name(option) in {"array", "-a"} for option in self.more)

    def _check_words(self) -> None:
        for word in (self.time, self.partition, self.account, self.job_name, self.output, *self.more):
            if word is not None and (not word or any(letter in word for letter in "\r\n")):
                raise ConfigurationError(f"{word!r} cannot be written in an #SBATCH line.")
        for option in self.more:
            if not option.startswith("-"):
                raise ConfigurationError(f"{option!r} is not an sbatch option.", do="pass --sbatch=--qos=high")

    def _check_more(self) -> None:
        """Reject a second value for a directive; sbatch silently uses the last one."""
        written: dict[str, str] = {}
        own = {directive_name(line): line for line in _own_directives(self)}
        for option in map(_option, self.more):
            name = directive_name(option)
            if name in own and option != own[name]:
                what = OWN_WORDS.get(name)
                raise ConfigurationError(
                    f"--sbatch={option} sets a directive of the batch script a second time.",
                    evidence=f"rankwise writes #SBATCH {own[name]}",
                    do=f"remove it, and pass {what} to rankwise submit"
                    if what
                    else "remove it: rankwise starts, "
                    "stops and requeues ranks with its own value; to change it, write the batch script by hand",
                )
            if written.setdefault(name, option) != option:
                raise ConfigurationError(
                    "A directive was given two values.",
                    evidence=f"--sbatch={written[name]}\n--sbatch={option}",
                    do="remove one of them",
                )

    def _check_time(self) -> None:
        limit_seconds = seconds_of(self.time) if self.time is not None else None
        if limit_seconds is not None and self.save_seconds and limit_seconds <= self.save_seconds + SLACK_SECONDS:
            raise ConfigurationError(
                f"With --time {self.time} the ranks would be notified to stop as soon as they start.",
                evidence=f"Slurm may notify them {self.save_seconds} + {SLACK_SECONDS} s before the limit",
                do="pass a longer --time, or a smaller --save-seconds",
            )


def seconds_of(time: str) -> int | None:
    """Return a time limit as Slurm reads it, or ``None`` if it is not a number (``UNLIMITED``).

    Source: sbatch(1): minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes,
        days-hours:minutes:seconds.
    """
    days, dash, rest = time.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in (*parts, days or "0")) or len(parts) > len("hms"):
        return None
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 1:
        return numbers[0] * 60
    hours, minutes, seconds = (0, *numbers)[-3:]
    return (hours * 60 + minutes) * 60 + seconds


def batch_script(options: JobOptions, python: str, target: Sequence[str]) -> str:
    """Return the text for sbatch; ``target`` follows ``rankwise run`` and its options: ``["train.py", "--lr", "0.1"]``.

    The interpreter ``python`` must have the same path on the nodes.
    """
    run = [python, "-m", "rankwise", "run", "-n", str(options.num_ranks), *target]
    lines = [
        "#!/bin/bash",
        *_directives(options),
        *_further_directives(options),
        "",
        "# Generated here, so that it is in no file: the agents and ranks of this job authenticate with it.",
        "export RANKWISE_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
        "",
        "# One agent per node, which starts the ranks there. If one exits, the others are not killed: they have been",
        "# notified, and may still be saving.",
        f"srun --export=ALL --cpus-per-task={options.cpus_per_node} --kill-on-bad-exit=0 \\",
        f"    {shlex.join(run)}",
        "code=$?",
        "",
        f"# {STOPPED_EXIT_CODE}: the ranks were asked to stop, and have saved. The job is requeued.",
        f"if [ $code = {STOPPED_EXIT_CODE} ]; then",
        f"    scontrol requeue {OWN_TASK if options.is_array else '$SLURM_JOB_ID'}",
        "fi",
        "exit $code",
        "",
    ]
    return "\n".join(lines)


def directive_name(option: str) -> str:
    """Return the directive that an sbatch option sets, by its long name: ``nodes`` for ``-N4`` and ``--nodes=4``."""
    if option.startswith("--"):
        name = re.split(r"[=\s]", option[2:], maxsplit=1)[0]
        return OPPOSITES.get(name, name)
    return SHORT_NAMES.get(option[1:2], option[:2])


def _own_directives(options: JobOptions) -> list[str]:
    """Return the options that rankwise writes itself, without comments."""
    return [line.removeprefix("#SBATCH ") for line in _directives(options) if line.startswith("#SBATCH ")]


def _directives(options: JobOptions) -> list[str]:
    given = {
        "job-name": options.job_name,
        "output": options.output or f"{options.job_name}-%j.log",
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "nodes": options.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": options.cpus_per_node,
        "gpus-per-node": options.gpus_per_node or None,
    }
    lines = [f"#SBATCH --{name}={_word(str(value))}" for name, value in given.items() if value is not None]
    lines += ["# If preempted or stopped early, the job is requeued, and appends to its log.", "#SBATCH --requeue"]
    lines += ["#SBATCH --open-mode=append"]
    if options.save_seconds:
        lines += [
            f"# This long before the limit, or up to {SLACK_SECONDS} s earlier, the ranks are told to save and stop.",
            f"#SBATCH --signal=USR2@{options.save_seconds}",
        ]
    return lines


def _further_directives(options: JobOptions) -> list[str]:
    """Return the user's own options, each once, without those that rankwise already writes."""
    own = _own_directives(options)
    return [f"#SBATCH {option}" for option in dict.fromkeys(map(_option, options.more)) if option not in own]


def _option(text: str) -> str:
    """Return a user's option with its value as one word, unless it is already quoted."""
    name, equals, value = text.partition("=")
    return text if '"' in value or "'" in value else f"{name}{equals}{_word(value) if value else ''}"


def _word(value: str) -> str:
    """Return ``value`` quoted as one word for sbatch, which accepts double quotes."""
    if all(letter.isalnum() or letter in "%_-./:,+=@" for letter in value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


# -- submitting it, and following the job --------------------------------------------------------------

SLURM_POLL_SECONDS = 1.0
"""How often the job is polled: scontrol queries the one controller of the cluster."""
SLURM_RETRY_SECONDS = 120.0
"""How long to retry a controller that does not answer: it may be restarting."""
_UNREACHABLE = ("Unable to contact slurm controller", "Could not establish a configuration source")
"""What sbatch says where no controller answers, and where it finds none to ask."""
FINAL_STATES = {
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
        evidence = (done.stderr or done.stdout).strip()
        is_refused = not any(words in evidence for words in _UNREACHABLE)
        raise LaunchError(
            "Slurm did not accept the job." if is_refused else "This machine cannot reach Slurm's controller.",
            evidence=evidence,
            do="sinfo shows the partitions and their limits; --dry-run shows the script"
            if is_refused
            else "run the command on a login node of the cluster, where `scontrol ping` answers; --dry-run shows the "
            "script",
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
        job = _facts_of_job(job_id)
        state = job["JobState"]
        log.show(Path(job["StdOut"]), show)
        if state != state_said and state in {"PENDING", "RUNNING", *FINAL_STATES}:
            state_said = state
            reason = "" if job["Reason"] == "None" else f" ({job['Reason']})"
            show(f"[rankwise] job {job_id}: {state}{reason}\n")
        if state in FINAL_STATES or (state == "PREEMPTED" and job.get("Requeue") == "0"):
            return exit_code(state, job["ExitCode"])
        time.sleep(SLURM_POLL_SECONDS)


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


def _facts_of_job(job_id: str) -> dict[str, str]:
    deadline = time.monotonic() + SLURM_RETRY_SECONDS
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
        time.sleep(SLURM_POLL_SECONDS)


def _run(argv: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)  # noqa: S603 - no shell
