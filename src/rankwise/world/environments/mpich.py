# SPDX-License-Identifier: Apache-2.0
"""The rows of the MPICH family: Hydra's mpiexec, and a bare PMI server such as Slurm's or Cray's.

Reads variables from a mapping, nothing else; no MPI library is needed. Imported by the table of
this package.
"""

from __future__ import annotations

from rankwise.world.environments.reading import (
    Environment,
    Missing,
    ProcessContext,
    Reading,
    address,
    file_name,
    given,
    integer,
    job_secret,
    required,
)

PMI_NAMES = ("PMI_RANK", "PMI_SIZE")
HYDRA_NAMES = (*PMI_NAMES, "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SET_ADDRESS = "mpiexec -genv MASTER_ADDR <machine of rank 0> -genv MASTER_PORT <a free port there> ..."


def _is_hydra(around: ProcessContext) -> bool:
    return bool(around.variables.get("MPI_LOCALRANKID") or around.variables.get("MPI_LOCALNRANKS"))


def _read_hydra(around: ProcessContext) -> Reading | Missing | None:
    if not (_is_hydra(around) and _has_pmi(around)):
        return None
    missing = required(around.variables, HYDRA_NAMES)
    if missing is not None:
        return missing
    local = (given(around.variables, "MPI_LOCALRANKID"), given(around.variables, "MPI_LOCALNRANKS"))
    return _reading(around, *local, source="mpich")


def _read_pmi(around: ProcessContext) -> Reading | Missing | None:
    if _is_hydra(around) or not _has_pmi(around):
        return None
    missing = required(around.variables, PMI_NAMES)
    if missing is not None:
        return missing
    local = (
        integer(around.variables, "PMI_LOCAL_RANK"),
        integer(around.variables, "PMI_LOCAL_SIZE"),
    )
    return _reading(around, *local, source="pmi")


def _has_pmi(around: ProcessContext) -> bool:
    return any(around.variables.get(name) for name in PMI_NAMES)


def _reading(around: ProcessContext, local_rank: int | None, local_world_size: int | None, *, source: str) -> Reading:
    world_size = given(around.variables, "PMI_SIZE")
    one_machine = local_world_size == world_size
    # Hydra sets no variable with the job's name, but its proxy is the parent of all ranks on a machine.
    job = around.variables.get("PMI_JOBID") or around.launcher_process
    return Reading(
        rank=given(around.variables, "PMI_RANK"),
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=0 if one_machine else None,
        num_nodes=1 if one_machine else None,
        address=address(around.variables),
        secret=job_secret(around.variables),
        job_key=file_name(f"{source}-{job}") if job else None,
        source=source,
    )


HYDRA_ROW = Environment(
    name="mpich",
    title="MPICH",
    sign="MPI_LOCALRANKID",
    because="PMI_RANK and MPI_LOCALRANKID are set, as Hydra's mpiexec does",
    names=(*HYDRA_NAMES, "MASTER_ADDR", "MASTER_PORT"),
    read=_read_hydra,
    set_address=SET_ADDRESS,
    # In an allocation mpiexec starts its proxies as a step of Slurm: the step's variables number
    # the proxies.
    overrules=frozenset({"slurm"}),
)
PMI_ROW = Environment(
    name="pmi",
    title="PMI",
    sign="PMI_RANK",
    because="PMI_RANK and PMI_SIZE are set, as a process manager for MPI does",
    names=(
        *PMI_NAMES,
        "PMI_LOCAL_RANK",
        "PMI_LOCAL_SIZE",
        "PMI_JOBID",
        "MASTER_ADDR",
        "MASTER_PORT",
    ),
    read=_read_pmi,
    set_address="set MASTER_ADDR to rank 0's machine and MASTER_PORT to a free port there",
)
