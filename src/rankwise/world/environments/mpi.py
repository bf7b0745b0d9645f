# SPDX-License-Identifier: Apache-2.0
"""The rows of launchers that start one process per rank and set no address: those of MPI, and of clusters built for it.

Reads variables from a mapping; no MPI library is needed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.world.environments import slurm
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
    from collections.abc import Callable, Iterable, Mapping

    from rankwise.world.environments.reading import ProcessContext

FIELDS = ("rank", "world_size", "local_rank", "local_world_size")
SLURM = frozenset({"slurm"})
"""In an allocation these launchers start their daemons as a step of Slurm: the step's variables number the daemons."""


def _row(
    name: str,
    title: str,
    names: Iterable[str],
    *,
    because: str,
    set_address: str,
    more: Mapping[str, str] | None = None,
    signs: tuple[tuple[str, ...], ...] = (),
    without: tuple[str, ...] = (),
    present: Callable[[Mapping[str, str]], bool] = lambda _: True,
    needed: Iterable[str] | None = None,
    job: tuple[str, ...] = (),
    any_names_job: bool = False,
    process_names_job: bool = False,
    complete: str = "",
    overrules: frozenset[str] = frozenset(),
    yields: bool = False,
) -> Environment:
    """Return a row. What is not listed here is as in :class:`Environment`.

    - ``names``: the variables of rank, world size, local rank and local world size; the last two may be left out.
    - ``more``: the variables of other fields of :class:`Reading`.
    - ``signs``: one variable of each group shows that the launcher is present; by default rank or world size.
      ``without``: any of these shows that it is not. Nor is it unless ``present`` agrees.
    - ``needed``: the variables without which the set is incomplete; by default rank and world size.
    - ``job``: together they name the job, with ``any_names_job`` those that are set. ``process_names_job``: the
      launcher's process on this machine does, if they are not set.
    """
    numbers = {**dict(zip(FIELDS, names, strict=False)), **(more or {})}
    signs = signs or ((numbers["rank"], numbers["world_size"]),)
    required = tuple(needed or (numbers["rank"], numbers["world_size"]))

    def read(around: ProcessContext) -> Reading | Missing | None:
        variables = around.variables
        if not all(any(map(variables.get, group)) for group in signs) or any(map(variables.get, without)):
            return None
        if not present(variables):
            return None
        found = read_numbers(name, variables, numbers, needed=required)
        if isinstance(found, Missing):
            return found
        if found.is_one_machine:
            found = replace(found, node_rank=0, num_nodes=1)
        given = [value for value in map(variables.get, job) if value]
        key = "-".join(given) if any_names_job or len(given) == len(job) else ""
        if process_names_job and not key:
            key = around.launcher_process or ""
        key = file_name(f"{name}-{key}") if key else None
        return replace(found, address=address(variables), secret=job_secret(variables), job_key=key)

    return Environment(
        name=name,
        title=title,
        sign=signs[0][0],
        because=because,
        names=(*numbers.values(), "MASTER_ADDR", "MASTER_PORT"),
        read=read,
        set_address=set_address,
        complete=complete,
        overrules=overrules,
        yields=yields,
    )


# OMPI_COMM_WORLD_NODE_RANK is not read: it numbers the processes of a machine, not the machines.
_OPENMPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
OPENMPI_ROW = _row(
    "openmpi",
    "Open MPI",
    _OPENMPI,
    needed=_OPENMPI,
    because="OMPI_COMM_WORLD_RANK is set, as mpirun does",
    # The first is random for each mpirun (version 4); the others may be reused after a while.
    job=("OMPI_MCA_orte_precondition_transports", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    any_names_job=True,
    set_address="mpirun -x MASTER_ADDR=<machine of rank 0> -x MASTER_PORT=<a free port there> ...",
    overrules=SLURM,
)

_PMI = ("PMI_RANK", "PMI_SIZE")
_HYDRA = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
HYDRA_ROW = _row(
    "mpich",
    "MPICH",
    (*_PMI, *_HYDRA),
    needed=(*_PMI, *_HYDRA),
    signs=(_HYDRA, _PMI),
    because="PMI_RANK and MPI_LOCALRANKID are set, as Hydra's mpiexec does",
    # Hydra sets no variable with the job's name, but its proxy is the parent of all ranks on a machine.
    job=("PMI_JOBID",),
    process_names_job=True,
    set_address="mpiexec -genv MASTER_ADDR <machine of rank 0> -genv MASTER_PORT <a free port there> ...",
    overrules=SLURM,
)
PMI_ROW = _row(
    "pmi",
    "PMI",
    (*_PMI, "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    without=_HYDRA,
    because="PMI_RANK and PMI_SIZE are set, as a process manager for MPI does",
    job=("PMI_JOBID",),
    process_names_job=True,
    set_address="set MASTER_ADDR to rank 0's machine and MASTER_PORT to a free port there",
)
# Source: "MPIRUN_RSH parameters" of the MVAPICH2 user guide. Its mpispawn is the parent of all ranks on a machine.
MVAPICH2_ROW = _row(
    "mvapich2",
    "MVAPICH2",
    (f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    because="MV2_COMM_WORLD_RANK is set, as mpirun_rsh does",
    process_names_job=True,
    set_address="mpirun_rsh ... MASTER_ADDR=<machine of rank 0> MASTER_PORT=<a free port there> python train.py",
    overrules=SLURM,
)
# Source: lightning.fabric.plugins.environments.lsf, which lists what jsrun sets; it sets PMIx's variables too.
JSRUN_ROW = _row(
    "jsrun",
    "jsrun",
    (f"JSM_NAMESPACE_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    because="JSM_NAMESPACE_RANK is set, as jsrun does",
    job=("LSB_JOBID", "PMIX_NAMESPACE"),
    set_address="jsrun -E MASTER_ADDR=<machine of rank 0> -E MASTER_PORT=<a free port there> ...",
)
# Source: flux-environment(7). FLUX_URI tells apart instances of Flux, which number their jobs each for itself.
FLUX_ROW = _row(
    "flux",
    "Flux",
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    more={"num_nodes": "FLUX_JOB_NNODES"},
    because="FLUX_TASK_RANK is set, as flux run does for each task",
    job=("FLUX_JOB_ID", "FLUX_URI"),
    set_address="flux run --env=MASTER_ADDR=<machine of rank 0> --env=MASTER_PORT=<a free port there> ...",
    overrules=SLURM,
)
# Source: "Launching with HPE PALS" of Open MPI 6, and scripts for Argonne's Aurora and Polaris, whose mpiexec it is.
# With --pmi=pmix it sets no PMI_SIZE.
PALS_ROW = _row(
    "pals",
    "Cray PALS",
    ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    more={"node_rank": "PALS_NODEID"},
    signs=(("PALS_RANKID",),),
    because="PALS_RANKID is set, as the mpiexec of HPE Cray systems does",
    job=("PALS_APID",),
    set_address="mpiexec --env MASTER_ADDR=<machine of rank 0> --env MASTER_PORT=<a free port there> ...",
    complete="start the ranks with mpiexec --pmi=cray, or set PMI_SIZE to their number",
)
# Slurm, jsrun and others set PMIX_RANK too, beside their own variables, which say more.
PRRTE_ROW = _row(
    "prrte",
    "PRRTE",
    ("PMIX_RANK", "WORLD_SIZE"),
    signs=(("PMIX_RANK",),),
    # A shell in a Slurm step has PMIX_RANK too, and passes it on to the jobs that sbatch submits there.
    present=lambda variables: not slurm.is_leftover(variables),
    because="PMIX_RANK is set, as prterun does, and WORLD_SIZE",
    job=("PMIX_NAMESPACE",),
    set_address="prterun -x MASTER_ADDR=<machine of rank 0> -x MASTER_PORT=<a free port there> ...",
    complete="start the ranks with mpirun, or as it does: prterun --personality ompi ..., which sets their number",
    yields=True,
)
