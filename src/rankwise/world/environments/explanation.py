# SPDX-License-Identifier: Apache-2.0
"""How the rank of this process was determined: every row of the table and its result, as a value.

Pure: variables in, an explanation out; decides nothing itself. Imported by this package's ``process``, for
``rankwise env`` and ``rankwise doctor``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.errors import RankwiseError
from rankwise.world.environments import table
from rankwise.world.environments.reading import SECRET_NAME, Missing, ProcessContext, Reading

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.world.environments.reading import Environment

FOUND, INCOMPLETE, OVERRULED, BAD, ABSENT = "found", "incomplete", "overruled", "bad", "not there"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The result for one environment of the table."""

    name: str
    title: str
    verdict: str
    """``found``, ``incomplete``, ``overruled``, ``bad`` or ``not there``."""
    rank: int | None = None
    world_size: int | None = None
    variables: tuple[tuple[str, str], ...] = ()
    """Names and values of its variables that are set."""
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What was decided about what started this process, and everything that was checked."""

    decided: Reading | None
    """``None`` if it could not be decided; ``error`` then holds the reason."""
    error: str | None
    rows: tuple[Row, ...]
    secret_is_set: bool
    """Whether the variable of the job's secret is set; its value is not included."""


def explain(variables: Mapping[str, str], argv: Sequence[str] = (), launcher_process: str | None = None) -> Explanation:
    """Return what :func:`rankwise.world.environments.table.read` decides, and why. Never raises for what it finds."""
    decided, error = None, None
    try:
        decided = table.read(variables, argv, launcher_process=launcher_process)
    except RankwiseError as raised:
        error = str(raised)
    around = ProcessContext(variables=variables, argv=argv, launcher_process=launcher_process)
    rows: list[Row] = []
    overruled_by: dict[str, Environment] = {}
    for environment in table.TABLE:
        row = _row(environment, around, overruled_by.get(environment.name), decided)
        if row.verdict == FOUND:
            for name in environment.overrules:
                overruled_by.setdefault(name, environment)
        rows.append(row)
    return Explanation(decided=decided, error=error, rows=tuple(rows), secret_is_set=bool(variables.get(SECRET_NAME)))


def _row(environment: Environment, around: ProcessContext, over: Environment | None, decided: Reading | None) -> Row:
    given = tuple((name, around.variables[name]) for name in environment.names if around.variables.get(name))
    said: Reading | Missing | RankwiseError | None
    try:
        said = environment.read(around)
    except RankwiseError as error:
        said = error
    rank = said.rank if isinstance(said, Reading | Missing) else None
    world_size = said.world_size if isinstance(said, Reading | Missing) else None
    if said is None:
        verdict, why = ABSENT, _why_absent(environment, around.variables)
    elif over is not None:
        verdict, why = OVERRULED, f"{over.title} started this process; these variables describe the job around it"
    elif isinstance(said, Missing):
        verdict, why = INCOMPLETE, f"not set: {', '.join(said.names)}"
    elif isinstance(said, RankwiseError):
        verdict, why = BAD, said.what
    else:
        verdict, why = FOUND, _why_found(environment, said, decided)
    return Row(
        name=environment.name,
        title=environment.title,
        verdict=verdict,
        rank=rank,
        world_size=world_size,
        # Several rows share address and rank variables; if this row is absent, they belong to another.
        variables=() if said is None and not around.variables.get(environment.sign) else given,
        why=why,
    )


def _why_absent(environment: Environment, variables: Mapping[str, str]) -> str:
    if variables.get(environment.sign):
        return f"{environment.sign} is set, but {environment.title} did not start this process"
    return f"{environment.sign} is not set"


def _why_found(environment: Environment, said: Reading, decided: Reading | None) -> str:
    if decided is None:
        return f"complete: {environment.because}"
    if decided.source == environment.name:
        return f"decides: {environment.because}"
    if (said.rank, said.world_size) == (decided.rank, decided.world_size):
        return f"agrees with {table.row(decided.source).title}, and adds facts that it leaves open"
    return "a step of one task, in which another launcher was started"
