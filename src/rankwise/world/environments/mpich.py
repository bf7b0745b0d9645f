# SPDX-License-Identifier: Apache-2.0
"""The rows of the MPICH family: Hydra's mpiexec, and a bare PMI server such as Slurm's or Cray's.

Reads variables from a mapping; no MPI library is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.world.environments.reading import Environment, read_mpi

if TYPE_CHECKING:
    from rankwise.world.environments.reading import Missing, ProcessContext, Reading

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
    return read_mpi(source, variables, dict(zip(FIELDS, names, strict=True)), needed=needed, job=job)


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
