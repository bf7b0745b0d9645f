# SPDX-License-Identifier: Apache-2.0
"""The batch script of a Slurm job, as text: what was asked for in, the lines that sbatch reads out.

Pure: calls no Slurm command, reads no variable. Imported by the command line and by ``slurm``.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError
from rankwise.health.preemption import STOPPED_EXIT_CODE

if TYPE_CHECKING:
    from collections.abc import Sequence

SAVE_SECONDS = 120
SLACK_SECONDS = 60
"""How much earlier than asked Slurm may send its signal (sbatch(1), ``--signal``)."""

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
"""By which option of ``rankwise submit`` a directive of sbatch is set, where there is one."""
SHORT_NAMES = {
    "N": "nodes",
    "t": "time",
    "p": "partition",
    "A": "account",
    "J": "job-name",
    "o": "output",
    "c": "cpus-per-task",
}
"""What sbatch's short options set, of those that rankwise writes."""
OPPOSITES = {"no-requeue": "requeue"}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """What is asked of Slurm. ``None`` leaves it to the cluster."""

    nodes: int = 1
    ranks_per_node: int | None = None
    """``None``: one per GPU, or one where no GPUs are asked for."""
    time: str | None = None
    """As sbatch takes it: ``2:00:00``."""
    partition: str | None = None
    account: str | None = None
    gpus_per_node: int = 0
    cpus_per_rank: int = 1
    job_name: str = "rankwise"
    output: str | None = None
    """Where the job's words go, with sbatch's patterns; ``NAME-%j.log`` by default."""
    save_seconds: int = SAVE_SECONDS
    """How long before the time limit the ranks are told to save and stop; 0 tells them nothing."""
    more: Sequence[str] = ()
    """Further options of sbatch, each whole: ``--qos=high``."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name, least in (("nodes", 1), ("cpus_per_rank", 1), ("gpus_per_node", 0), ("save_seconds", 0)):
            if getattr(self, name) < least:
                option = f"--{name.replace('_', '-')}"
                raise ConfigurationError(
                    f"{option} is {getattr(self, name)}.", do=f"pass {option} {least} or more, or leave it out"
                )
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ConfigurationError(f"--ranks-per-node is {self.ranks_per_node}.", do="pass 1 or more")
        if 0 < self.gpus_per_node < self.num_ranks:
            raise ConfigurationError(
                f"{self.num_ranks} ranks per node cannot have a GPU each of {self.gpus_per_node}.",
                do=f"pass --ranks-per-node {self.gpus_per_node}, or --gpus-per-node {self.num_ranks}",
            )
        self._check_words()
        self._check_more()
        self._check_time()

    @property
    def num_ranks(self) -> int:
        """How many ranks each node gets."""
        return self.ranks_per_node or self.gpus_per_node or 1

    @property
    def cpus_per_node(self) -> int:
        """How many CPU cores each node's agent gets, with its ranks."""
        return self.num_ranks * self.cpus_per_rank

    def _check_words(self) -> None:
        for word in (self.time, self.partition, self.account, self.job_name, self.output, *self.more):
            if word is not None and (not word or any(letter in word for letter in "\r\n")):
                raise ConfigurationError(f"{word!r} is not a value that a line of sbatch can hold.")
        for option in self.more:
            if not option.startswith("-"):
                raise ConfigurationError(f"{option!r} is not an option of sbatch.", do="pass --sbatch=--qos=high")

    def _check_more(self) -> None:
        """Refuse what would give a directive a second value; sbatch goes by the last one, and says nothing."""
        written: dict[str, str] = {}
        own = {directive_name(line): line for line in _own_directives(self)}
        for option in map(_option, self.more):
            name = directive_name(option)
            if name in own and option != own[name]:
                what = OWN_WORDS.get(name)
                raise ConfigurationError(
                    f"--sbatch={option} gives a directive of the batch script a second value.",
                    evidence=f"rankwise writes #SBATCH {own[name]}",
                    do=f"leave it out, and pass {what} to rankwise submit"
                    if what
                    else "leave it out: ranks are "
                    "started, stopped and requeued by rankwise's own; for others, write the batch script by hand",
                )
            if written.setdefault(name, option) != option:
                raise ConfigurationError(
                    "One directive was given two values.",
                    evidence=f"--sbatch={written[name]}\n--sbatch={option}",
                    do="leave one of them out",
                )

    def _check_time(self) -> None:
        limit_seconds = seconds_of(self.time) if self.time is not None else None
        if limit_seconds is not None and self.save_seconds and limit_seconds <= self.save_seconds + SLACK_SECONDS:
            raise ConfigurationError(
                f"Within --time {self.time} the ranks would be told to stop as soon as they start.",
                evidence=f"Slurm may tell them {self.save_seconds} + {SLACK_SECONDS} s before the limit",
                do="pass a longer --time, or a smaller --save-seconds",
            )


def seconds_of(time: str) -> int | None:
    """Return a time limit as Slurm reads it, or ``None`` where it has no number (``UNLIMITED``).

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
    """Return the text for sbatch.

    Args:
        options: what is asked for.
        python: the interpreter, which the nodes find under the same path.
        target: words of the command after ``rankwise run`` and its options: ``["train.py", "--lr", "0.1"]``.
    """
    run = [python, "-m", "rankwise", "run", "-n", str(options.num_ranks), *target]
    lines = [
        "#!/bin/bash",
        *_directives(options),
        *_further_directives(options),
        "",
        "# Drawn here, so that no file holds it: by it the agents and ranks of this job know one another.",
        "export RANKWISE_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
        "",
        "# One agent per node, which starts the ranks there. One that ends does not take the others with it: they have",
        "# heard of it, and may still be saving.",
        f"srun --export=ALL --cpus-per-task={options.cpus_per_node} --kill-on-bad-exit=0 \\",
        f"    {shlex.join(run)}",
        "code=$?",
        "",
        f"# {STOPPED_EXIT_CODE}: the ranks were told to stop, and have saved. The job goes back into the queue.",
        f"if [ $code = {STOPPED_EXIT_CODE} ]; then",
        "    scontrol requeue $SLURM_JOB_ID",
        "fi",
        "exit $code",
        "",
    ]
    return "\n".join(lines)


def directive_name(option: str) -> str:
    """Return which directive an option of sbatch sets, by its long name: ``nodes`` of ``-N4`` and ``--nodes=4``."""
    if option.startswith("--"):
        name = re.split(r"[=\s]", option[2:], maxsplit=1)[0]
        return OPPOSITES.get(name, name)
    return SHORT_NAMES.get(option[1:2], option[:2])


def _own_directives(options: JobOptions) -> list[str]:
    """Return the options that rankwise writes itself, without the comments between them."""
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
    lines += ["# Preempted or stopped early, the job comes back, and adds to its log.", "#SBATCH --requeue"]
    lines += ["#SBATCH --open-mode=append"]
    if options.save_seconds:
        lines += [
            f"# So long before the limit, or up to {SLACK_SECONDS} s earlier, the ranks are told to save and stop.",
            f"#SBATCH --signal=USR2@{options.save_seconds}",
        ]
    return lines


def _further_directives(options: JobOptions) -> list[str]:
    """Return the user's own, each once, without those that rankwise writes already."""
    own = _own_directives(options)
    return [f"#SBATCH {option}" for option in dict.fromkeys(map(_option, options.more)) if option not in own]


def _option(text: str) -> str:
    """Return an option of the user's with its value as one word, unless it is quoted already."""
    name, equals, value = text.partition("=")
    return text if '"' in value or "'" in value else f"{name}{equals}{_word(value) if value else ''}"


def _word(value: str) -> str:
    """Return ``value`` as sbatch reads one word: it knows double quotes."""
    if all(letter.isalnum() or letter in "%_-./:,+=@" for letter in value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
