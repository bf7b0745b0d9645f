# SPDX-License-Identifier: Apache-2.0
"""The ordered table of environments, and the decision about which of them started this process.

Pure: variables in, a reading out. A new environment is one new file and one line here. Imported by this package's
``process``, the explanation for ``rankwise env`` and ``rankwise doctor``. The rules:

- Only a complete set of a launcher's variables counts. An incomplete set is an error that names
  what is missing, not a world of one.
- rankwise and torchrun own the processes they start; any other variables describe the job around them.
  rankwise sets torchrun's variables too, and the job's name in ``RANKWISE_RUN_ID`` and ``TORCHELASTIC_RUN_ID``: where
  the two differ, a rank has started a torchrun in between.
- mpirun and mpiexec are between Slurm and the process: in an allocation, Slurm's variables number their daemons.
- Schedulers that start one process per machine describe the job around any launcher of ranks. Under ``rankwise run``
  they number its machines.
- A single rank describes no job around it: it may be one of several that were started one by one. Schedulers' numbers
  then count too, and so do variables of any other name. Only rankwise and torchrun know better.
- Any two other readings must agree on rank and world size, and then complement each other. If they disagree, the error
  shows both.
- Rank 0 is never assumed to be on this machine. If all ranks are on one machine, it publishes its address in a file
  named after the job; several machines without an address are an error.
- Without a launcher, variables of any name that number this process among others are an error, not a world of one.
  ``RANKWISE_ALONE=1`` makes it a world of one, whatever the others give, but not below rankwise and torchrun.
- A Slurm step over several machines uses the first host of the step and the port
  ``20000 + (101 * job + step) mod 10000``, unless ``MASTER_ADDR`` and ``MASTER_PORT`` are set.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError, EnvironmentConflict, RankwiseError
from rankwise.world.environments import machines, mpi, rankwise, siblings, slurm, torchrun
from rankwise.world.environments.reading import SECRET_NAME, Environment, Missing, ProcessContext, Reading, misfit, told

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OWNERS = (rankwise.ROW, torchrun.ROW)
"""They own the processes they start: other variables describe the job around them."""
TABLE = (
    *OWNERS,
    # Set by hand, or by an operator, for this particular process.
    torchrun.ENV_ROW,
    # mpirun inside an allocation is between Slurm and the process.
    mpi.OPENMPI_ROW,
    mpi.HYDRA_ROW,
    mpi.MVAPICH2_ROW,
    mpi.JSRUN_ROW,
    mpi.FLUX_ROW,
    mpi.PALS_ROW,
    slurm.ROW,
    # srun can also serve PMI; Slurm's own variables then hold more.
    mpi.PMI_ROW,
    # What follows counts only where nothing above has started ranks.
    *machines.ROWS,
    mpi.PRRTE_ROW,
)
NOBODY = "nobody"


def read(
    variables: Mapping[str, str],
    argv: Sequence[str] = (),
    environment: str | None = None,
    *,
    launcher_process: str | None = None,
) -> Reading:
    """Return what started a process, from its variables and its arguments; ``"nobody"`` if no launcher did.

    ``environment`` names the row to use, whatever the others give; ``None`` decides. ``argv`` is read for the
    ``--local_rank`` of old launchers. ``launcher_process`` identifies the launcher's process on this machine, if one
    was found; it replaces the name of the job if no variable has one.

    Raises:
        EnvironmentConflict: two environments contradict each other about this process.
        ConfigurationError: a set of variables is incomplete, a value is invalid, or rank 0 cannot be reached.
    """
    around = ProcessContext(variables=variables, argv=argv, launcher_process=launcher_process)
    if environment is not None:
        return _named(around, environment)
    found, partial = _complete_readings(around)
    if partial is not None:
        _accept(around, partial, found)
    if not found:
        return _nobody(variables)
    reading = reachable(_decided(around, found))
    if reading.ranks_to_start > 1:
        raise ConfigurationError(
            f"{row(reading.source).title} has started one process on this machine, but expects "
            f"{reading.ranks_to_start} ranks here.",
            evidence=reading.reason,
            do="start the script with `rankwise run train.py`, or set RANKWISE_ALONE=1 for one rank of its own",
        )
    return reading


def read_launcher(variables: Mapping[str, str], launcher_process: str | None = None) -> Reading | None:
    """Return which of several launchers this process is, if a scheduler has started one on each machine.

    Also what it expects of a single one. ``None`` below rankwise and torchrun: a launcher there starts its own job.

    Raises:
        EnvironmentConflict: as :func:`read`.
        ConfigurationError: as :func:`read`.
    """
    around = ProcessContext(variables=variables, launcher_process=launcher_process)
    if any(owner.read(around) is not None for owner in OWNERS):
        return None
    # Users export WORLD_SIZE alone for other libraries.
    found, _ = _complete_readings(around)
    reading = _decided(around, found) if found else _nobody(variables)
    return reachable(reading) if reading.world_size > 1 or reading.ranks_to_start > 1 else None


def row(name: str) -> Environment:
    """Return the row of that name.

    Raises:
        ConfigurationError: there is none.
    """
    for candidate in TABLE:
        if candidate.name == name:
            return candidate
    known = ", ".join([*(candidate.name for candidate in TABLE), NOBODY])
    raise ConfigurationError(f"Unknown environment {name!r}.", do=f"use one of {known}")


def incomplete(environment: Environment, missing: Missing, variables: Mapping[str, str]) -> ConfigurationError:
    """Return the error for an incomplete set of variables."""
    names = ", ".join(missing.names)
    verb = "is" if len(missing.names) == 1 else "are"
    return ConfigurationError(
        f"The variables of {environment.title} are incomplete: {names} {verb} not set.",
        evidence=told(variables, environment.names),
        do=environment.complete or f"set {names} in every process, or unset the others to run as one rank",
    )


def reachable(reading: Reading) -> Reading:
    """Return ``reading`` if its ranks can find each other.

    Raises:
        ConfigurationError: they cannot. This machine is never assumed to be rank 0's.
    """
    if reading.world_size == 1 or reading.address is not None or reading.file is not None:
        return reading
    if reading.is_one_machine and reading.job_key is not None:
        return reading
    raise ConfigurationError(
        f"Rank 0 of {reading.world_size} ranks cannot be found: no address is given.",
        evidence=reading.reason,
        do=row(reading.source).set_address,
    )


def _complete_readings(around: ProcessContext) -> tuple[list[Reading], Missing | None]:
    found: list[Reading] = []
    partial: Missing | None = None
    for environment in OWNERS if is_alone(around.variables) else TABLE:
        if any(_overrules(row(other.source), other.world_size, environment) for other in found):
            continue
        said = environment.read(around)
        if isinstance(said, Missing):
            if environment is not torchrun.ENV_ROW:
                raise incomplete(environment, said, around.variables)
            partial = said
        elif said is not None:
            found.append(said)
    return found, partial


def is_alone(variables: Mapping[str, str]) -> bool:
    """Return whether the user wants a world of one, whatever other variables are set: ``RANKWISE_ALONE=1``."""
    return variables.get("RANKWISE_ALONE", "0").strip() not in {"", "0"}


def _overrules(one: Environment, world_size: int | None, other: Environment) -> bool:
    """Return whether ``other``, later in the table, describes the job around ``one``, found with ``world_size``."""
    if one is other or one.owns:
        return one is not other
    if world_size == 1 and other in machines.ROWS:
        # The pod of a scheduler's only machine is also the only one of its indexed Job.
        return one in machines.ROWS and other is machines.INDEXED_JOB
    return other.yields or other.name in one.overrules


def _accept(around: ProcessContext, partial: Missing, found: list[Reading]) -> None:
    """Accept ``WORLD_SIZE`` without ``RANK``, or the reverse, if a complete set agrees.

    Slurm users export ``WORLD_SIZE`` in the batch script, for other libraries.
    """
    for reading in found:
        if partial.rank in {None, reading.rank} and partial.world_size in {None, reading.world_size}:
            return
    raise incomplete(torchrun.ENV_ROW, partial, around.variables)


def _decided(around: ProcessContext, found: list[Reading]) -> Reading:
    """Return what all readings together say, with its reason."""
    reading = _checked(around, _agreed(around, found))
    if reading.world_size == 1 and not row(reading.source).owns:
        judged = {name for one in found for name in row(one.source).names}
        if machines.numbers_machines(around.variables):
            judged |= {"RANK", "WORLD_SIZE"}
        siblings.refuse({name: value for name, value in around.variables.items() if name not in judged})
    return reading


def _agreed(around: ProcessContext, found: list[Reading]) -> Reading:
    """Return the first reading, completed by those that agree with it."""
    telling = found
    if any(one.world_size > 1 or one.ranks_to_start > 1 for one in found):
        # A step of one task may not be a launch but a shell, in which the user starts something else.
        telling = [one for one in found if (one.source, one.world_size) != ("slurm", 1)]
    first, *others = telling
    for other in others:
        if (other.rank, other.world_size) != (first.rank, first.world_size):
            raise _conflict(around, first, other)
        first = _completed(first, other)
    return first


def _completed(reading: Reading, other: Reading) -> Reading:
    """Return ``reading`` with the facts it leaves open taken from ``other``."""
    left_open = [one.name for one in fields(Reading) if getattr(reading, one.name) is None]
    return replace(reading, **{name: getattr(other, name) for name in left_open})


def _conflict(around: ProcessContext, first: Reading, other: Reading) -> EnvironmentConflict:
    rows = (row(first.source), row(other.source))
    evidence = "\n".join(
        f"{one.title}: rank {reading.rank} of {reading.world_size}, from {told(around.variables, one.names)}"
        for one, reading in zip(rows, (first, other), strict=True)
    )
    shared = set(rows[0].names) & set(rows[1].names)
    own = [[name for name in one.names if name not in shared] for one in rows]
    unset = [" ".join(f"-u {name}" for name in names if name in around.variables) for names in own]
    return EnvironmentConflict(
        f"{rows[0].title} and {rows[1].title} disagree on the rank of this process.",
        evidence=evidence,
        do=f"keep {rows[1].title}: env {unset[0]} python ...\nor keep {rows[0].title}: env {unset[1]} python ...",
    )


def _checked(around: ProcessContext, reading: Reading) -> Reading:
    """Return ``reading`` with its reason, if its numbers fit together."""
    environment = row(reading.source)
    evidence = told(around.variables, environment.names) or f"{reading.rank} of {reading.world_size}"
    wrong = misfit(reading)
    if wrong is not None:
        raise ConfigurationError(
            f"{environment.title}'s numbers are inconsistent: {wrong}.",
            evidence=evidence,
            do="correct the variables, or start the script with `rankwise run`",
        )
    reason = f"{environment.title}: {evidence}, because {environment.because}"
    # Torchrun and rankwise set the plain variables themselves.
    others = [
        one
        for one in TABLE
        if _overrules(environment, reading.world_size, one) and one not in (*OWNERS, torchrun.ENV_ROW)
    ]
    surrounding = [one.title for one in others if around.variables.get(one.sign)]
    if surrounding:
        reason += f"; variables of {' and '.join(surrounding)} are also set, from the job around it"
    return replace(reading, reason=reason)


def _named(around: ProcessContext, name: str) -> Reading:
    if name == NOBODY:
        return Reading(rank=0, world_size=1, source=NOBODY, reason="one rank, as requested")
    environment = row(name)
    said = environment.read(around)
    if said is None:
        raise ConfigurationError(
            f"{environment.title} did not start this process: its variables are not set.",
            do=f"remove environment={name!r}, or set {', '.join(environment.names)}",
        )
    if isinstance(said, Missing):
        raise incomplete(environment, said, around.variables)
    return reachable(_checked(around, said))


def _nobody(variables: Mapping[str, str]) -> Reading:
    reading = Reading(rank=0, world_size=1, source=NOBODY, reason="no launcher's variables are set")
    if is_alone(variables):
        return replace(reading, reason="one rank, because RANKWISE_ALONE is set")
    siblings.refuse(variables)
    # Without a number of tasks, as for sbatch --nodes=2, srun starts one on each node.
    sizes = [name for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES") if variables.get(name, "") not in {"", "1"}]
    if variables.get("SLURM_JOB_ID") and sizes:
        told_by, size = told(variables, ("SLURM_JOB_ID", sizes[0])), variables[sizes[0]]
        reason = f"{told_by}, but this process is not in a Slurm step; start it with srun to get {size} ranks"
    elif counted := siblings.counts(variables):
        reason = f"{counted} is set, but no variable shows that this process is one of them: one rank"
        reason += "; RANKWISE_ALONE=1 says it is meant"
    else:
        return reading
    return replace(reading, reason=reason, warns=True)


# -- how it was decided: every row and its result, as a value -------------------------------------------------

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
        decided = read(variables, argv, launcher_process=launcher_process)
    except RankwiseError as raised:
        error = str(raised)
    around = ProcessContext(variables=variables, argv=argv, launcher_process=launcher_process)
    rows: list[Row] = []
    found: list[tuple[Environment, int | None]] = []
    for environment in TABLE:
        over = next((one for one, world_size in found if _overrules(one, world_size, environment)), None)
        checked = _row(environment, around, over, decided)
        if checked.verdict == FOUND:
            found.append((environment, checked.world_size))
        rows.append(checked)
    return Explanation(decided=decided, error=error, rows=tuple(rows), secret_is_set=bool(variables.get(SECRET_NAME)))


def names_of_several(variables: Mapping[str, str]) -> set[str]:
    """Return the variables by which schedulers of one process per machine number several; others are for scripts."""
    rows = zip(TABLE, explain(variables).rows, strict=True)
    several = [one for one, checked in rows if one.yields and checked.verdict != ABSENT and checked.world_size != 1]
    return {name for one in several for name in (*one.names, one.sign)}


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
        return f"agrees with {row(decided.source).title}, and adds facts that it leaves open"
    return "a step of one task, in which another launcher was started"
