# SPDX-License-Identifier: Apache-2.0
"""What one environment shows about this process, as a value, and how variables are read.

Pure: takes mappings, returns values, reads no process variable itself. Imported by the rows of this package.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


LARGEST_PORT = 65535
SECRET_NAME = "RANKWISE_SECRET"  # noqa: S105 - its name
"""The variable of the job's secret. It is in no row's names, so that no text about variables shows it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What the variables of one environment give. ``None`` is what they leave open.

    Its many fields belong together: they are all that a launcher can tell a process, and no launcher sets every one.
    """

    rank: int
    """Number of this process, from 0 to ``world_size - 1``."""
    world_size: int
    """Number of processes the launcher started, on all machines."""
    local_rank: int | None = None
    """Number of this process among those on its machine."""
    local_world_size: int | None = None
    """Number of processes on this machine."""
    node_rank: int | None = None
    """Number of this machine."""
    num_nodes: int | None = None
    """Number of machines."""
    ranks_per_node: tuple[int, ...] | None = None
    """Number of processes on each machine, in order."""
    address: tuple[str, int] | None = None
    """Host and port of the job's store."""
    file: str | None = None
    """Path of the file the job's store is kept in, if the user gave one."""
    ranks_to_start: int = 1
    """Number of ranks that a scheduler expects on this machine, where it has started a single process."""
    job_key: str | None = None
    """Text that is unique to this job and valid as a file name: ranks on one machine find each other by it."""
    secret: str | None = field(default=None, repr=False)
    """What a process must hold to connect to the job's store; must never be shown."""
    store_is_served: bool = False
    """Whether the launcher serves the store at ``address``; otherwise rank 0 does."""
    source: str
    """Name of the row it was read from, or ``"explicit"``, or ``"nobody"``."""
    attempt: str = "0"
    """Identifies the restart of a job, the same on every rank."""
    reason: str = ""
    """One line for people: what was decided, from which variables, and why."""
    stop_signals: tuple[str, ...] = ()
    """Names of the signals that ask this process itself to stop soon."""
    warns: bool = False
    """Whether to log ``reason`` for a world of one: the user probably expects more ranks."""

    @property
    def is_one_machine(self) -> bool:
        """Whether all ranks are known to be on this machine."""
        return self.num_nodes == 1 or self.local_world_size == self.world_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """An incomplete set of variables."""

    names: tuple[str, ...]
    """Variables that are not set."""
    rank: int | None = None
    """The rank that the others give, if they do."""
    world_size: int | None = None
    """The world size that the others give, if they do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessContext:
    """Everything that identifies a process: its variables, its arguments, and its launcher."""

    variables: Mapping[str, str]
    argv: Sequence[str] = ()
    launcher_process: str | None = None
    """Identity of the launcher's process on this machine, if no variable names the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """One row of the table: an environment, how to detect it, and how to describe it."""

    name: str
    """The value of :attr:`Reading.source`."""
    title: str
    """The name for people."""
    sign: str
    """The variable whose presence shows that this environment is present."""
    because: str
    """Why these variables mean that this environment started the process, after "because"."""
    names: tuple[str, ...]
    """The variables it sets and this row reads."""
    read: Callable[[ProcessContext], Reading | Missing | None]
    """Read them; ``None`` when the environment did not start this process."""
    set_address: str
    """How to give the address of rank 0 if the environment does not."""
    complete: str = ""
    """What to do about an incomplete set of its variables; empty: set those that are missing."""
    overrules: frozenset[str] = frozenset()
    """Rows whose variables only describe the job around this one, once this one is found."""
    owns: bool = False
    """Whether the variables of any other row only describe the job around this one, once this one is found."""
    yields: bool = False
    """Whether its variables only describe the job around any other row that is found before it."""


def read_numbers(
    source: str, variables: Mapping[str, str], numbers: Mapping[str, str], *, needed: Iterable[str]
) -> Reading | Missing:
    """Return the numbers in a row's variables, unless the set is incomplete. An empty variable counts as not set.

    Args:
        source: name of the row.
        variables: of the process.
        numbers: by field of :class:`Reading`, the variable that holds it.
        needed: the variables without which the set is incomplete.

    Raises:
        ConfigurationError: a value is not a number.
    """
    missing = tuple(name for name in needed if not variables.get(name))
    if missing:
        return Missing(names=missing)
    found: dict[str, Any] = {field_name: integer(variables, name) for field_name, name in numbers.items()}
    return Reading(source=source, **found)


def integer(variables: Mapping[str, str], name: str) -> int | None:
    """Return a variable as a number >= 0, or ``None`` if it is not set.

    Raises:
        ConfigurationError: it has another value.
    """
    text = variables.get(name)
    return parse_integer(text, name) if text else None


def parse_integer(text: str, name: str) -> int:
    """Return ``text`` as a number >= 0; ``name`` shows the user where it is.

    Raises:
        ConfigurationError: it is not such a number.
    """
    # isdecimal() alone would accept digits of other scripts.
    if not (text.strip().isascii() and text.strip().isdecimal()):
        raise ConfigurationError(f"{name} must be an integer >= 0, got {text!r}.", do=f"correct {name}, or unset it")
    return int(text)


def given(variables: Mapping[str, str], name: str) -> int:
    """Return a variable that is set, as a number >= 0."""
    return parse_integer(variables[name], name)


def address(variables: Mapping[str, str]) -> tuple[str, int] | None:
    """Return ``MASTER_ADDR`` and ``MASTER_PORT``, or ``None`` unless both are set.

    Raises:
        ConfigurationError: the port is invalid.
    """
    host, port = variables.get("MASTER_ADDR"), integer(variables, "MASTER_PORT")
    if not host or port is None:
        return None
    return host, checked_port(port, "MASTER_PORT")


def job_secret(variables: Mapping[str, str]) -> str | None:
    """Return the secret of the job, or ``None`` if it is not set.

    Raises:
        ConfigurationError: it is set but empty.
    """
    secret = variables.get(SECRET_NAME)
    if secret is not None and not secret.strip():
        raise ConfigurationError(
            f"{SECRET_NAME} is set but empty: the job would run without a secret.",
            do=f"set {SECRET_NAME} to a long random text for every process of the job, or unset it",
        )
    return secret


def parse_address(text: str, name: str) -> tuple[str, int]:
    """Return ``host:port`` as a pair; an IPv6 host is in brackets.

    Raises:
        ConfigurationError: the text has another form.
    """
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdecimal()):
        raise ConfigurationError(f"{name}={text!r} is not host:port.", do=f"for example {name}=gpu-01:29500")
    return host.removeprefix("[").removesuffix("]"), checked_port(int(port), name)


def checked_port(port: int, name: str) -> int:
    """Return ``port`` if a server can listen on it.

    Raises:
        ConfigurationError: it is 0 or above 65535.
    """
    if not 0 < port <= LARGEST_PORT:
        raise ConfigurationError(
            f"The port in {name} must be 1 to {LARGEST_PORT}, got {port}.", do="give a free port, for example 29500"
        )
    return port


def file_name(text: str) -> str:
    """Return ``text`` with everything but letters, digits, ``.``, ``-`` and ``_`` replaced."""
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in ".-_") else "_" for letter in text)


def misfit(reading: Reading) -> str | None:
    """Return which numbers of a reading are inconsistent, or ``None`` if none are."""
    for name, number, limit in (
        ("rank", reading.rank, reading.world_size),
        ("local_rank", reading.local_rank, reading.local_world_size),
        ("node_rank", reading.node_rank, reading.num_nodes),
    ):
        if number is not None and limit is not None and number >= limit:
            return f"{name} {number} of {limit}, counted from 0"
    for name, part in (("local_world_size", reading.local_world_size), ("num_nodes", reading.num_nodes)):
        if part is not None and part > reading.world_size:
            return f"{name} {part} of world_size {reading.world_size}"
    return None


def told(variables: Mapping[str, str], names: Sequence[str]) -> str:
    """Return ``NAME=value`` for every variable of ``names`` that is set."""
    return " ".join(f"{name}={variables[name]}" for name in names if variables.get(name))


def parse_counts(text: str, name: str) -> list[int]:
    """Return the count of each machine; ``name`` is the variable that holds the list.

    Raises:
        ConfigurationError: the list cannot be read.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if match is None:
            raise ConfigurationError(f"{name}={text!r} cannot be parsed.", do="use the form 2(x3),1")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts


def format_counts(counts: Iterable[int]) -> str:
    """Return the list as one text, equal neighbors folded."""
    folded = [(count, len(list(equal))) for count, equal in groupby(counts)]
    return ",".join(str(count) if number == 1 else f"{count}(x{number})" for count, number in folded)
