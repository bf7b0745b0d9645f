# SPDX-License-Identifier: Apache-2.0
"""The rows of MPI: Open MPI's mpirun; MPICH's Hydra; a bare PMI server such as Slurm's or Cray's.

Reads variables from a mapping; no MPI library is needed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.world.environments.reading import (
    Environment,
    Missing,
    Reading,
    address,
    file_name,
    job_secret,
    read_numbers,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rankwise.world.environments.reading import ProcessContext


def _read_mpi(
    source: str, variables: Mapping[str, str], numbers: Mapping[str, str], *, needed: Iterable[str], job: str | None
) -> Reading | Missing:
    """Do as :func:`read_numbers`, for a launcher of MPI, which sets no address: only the name of its ``job``."""
    found = read_numbers(source, variables, numbers, needed=needed)
    if isinstance(found, Missing):
        return found
    if found.is_one_machine:
        found = replace(found, node_rank=0, num_nodes=1)
    return replace(
        found,
        address=address(variables),
        secret=job_secret(variables),
        job_key=file_name(f"{source}-{job}") if job else None,
    )


# OMPI_COMM_WORLD_NODE_RANK is not read: it numbers the processes of a machine, not the machines.
OPENMPI_NUMBERS = {
    "rank": "OMPI_COMM_WORLD_RANK",
    "world_size": "OMPI_COMM_WORLD_SIZE",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "local_world_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
# The first is random for each mpirun (version 4); the others may be reused after a while.
JOB_NAMES = ("OMPI_MCA_orte_precondition_transports", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


def _read_openmpi(around: ProcessContext) -> Reading | Missing | None:
    variables = around.variables
    if not (variables.get("OMPI_COMM_WORLD_RANK") or variables.get("OMPI_COMM_WORLD_SIZE")):
        return None
    job = "-".join(variables[name] for name in JOB_NAMES if variables.get(name))
    return _read_mpi("openmpi", variables, OPENMPI_NUMBERS, needed=OPENMPI_NUMBERS.values(), job=job)


OPENMPI_ROW = Environment(
    name="openmpi",
    title="Open MPI",
    sign="OMPI_COMM_WORLD_RANK",
    because="OMPI_COMM_WORLD_RANK is set, as mpirun does",
    names=(*OPENMPI_NUMBERS.values(), "MASTER_ADDR", "MASTER_PORT"),
    read=_read_openmpi,
    set_address="mpirun -x MASTER_ADDR=<machine of rank 0> -x MASTER_PORT=<a free port there> ...",
    # In an allocation mpirun starts its daemons as a step of Slurm: the step's variables number the daemons.
    overrules=frozenset({"slurm"}),
)


PMI_NAMES = ("PMI_RANK", "PMI_SIZE")
HYDRA_NAMES = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
LOCAL_NAMES = ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
FIELDS = ("rank", "world_size", "local_rank", "local_world_size")


def _is_hydra(around: ProcessContext) -> bool:
    return any(around.variables.get(name) for name in HYDRA_NAMES)


def _read_hydra(around: ProcessContext) -> Reading | Missing | None:
    names = (*PMI_NAMES, *HYDRA_NAMES)
    return _read("mpich", around, names, needed=names) if _is_hydra(around) else None


def _read_pmi(around: ProcessContext) -> Reading | Missing | None:
    return None if _is_hydra(around) else _read("pmi", around, (*PMI_NAMES, *LOCAL_NAMES), needed=PMI_NAMES)


def _read(
    source: str, around: ProcessContext, names: tuple[str, ...], *, needed: tuple[str, ...]
) -> Reading | Missing | None:
    variables = around.variables
    if not any(variables.get(name) for name in PMI_NAMES):
        return None
    # Hydra sets no variable with the job's name, but its proxy is the parent of all ranks on a machine.
    job = variables.get("PMI_JOBID") or around.launcher_process
    return _read_mpi(source, variables, dict(zip(FIELDS, names, strict=True)), needed=needed, job=job)


HYDRA_ROW = Environment(
    name="mpich",
    title="MPICH",
    sign="MPI_LOCALRANKID",
    because="PMI_RANK and MPI_LOCALRANKID are set, as Hydra's mpiexec does",
    names=(*PMI_NAMES, *HYDRA_NAMES, "MASTER_ADDR", "MASTER_PORT"),
    read=_read_hydra,
    set_address="mpiexec -genv MASTER_ADDR <machine of rank 0> -genv MASTER_PORT <a free port there> ...",
    # In an allocation mpiexec starts its proxies as a step of Slurm: the step's variables number the proxies.
    overrules=frozenset({"slurm"}),
)
PMI_ROW = Environment(
    name="pmi",
    title="PMI",
    sign="PMI_RANK",
    because="PMI_RANK and PMI_SIZE are set, as a process manager for MPI does",
    names=(*PMI_NAMES, *LOCAL_NAMES, "PMI_JOBID", "MASTER_ADDR", "MASTER_PORT"),
    read=_read_pmi,
    set_address="set MASTER_ADDR to rank 0's machine and MASTER_PORT to a free port there",
)
