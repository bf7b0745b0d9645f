# SPDX-License-Identifier: Apache-2.0
"""The row of Open MPI's mpirun. Reads variables from a mapping; no MPI library is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.world.environments.reading import Environment, read_mpi

if TYPE_CHECKING:
    from rankwise.world.environments.reading import Missing, ProcessContext, Reading

# OMPI_COMM_WORLD_NODE_RANK is not read: it numbers the processes of a machine, not the machines.
NUMBERS = {
    "rank": "OMPI_COMM_WORLD_RANK",
    "world_size": "OMPI_COMM_WORLD_SIZE",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "local_world_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
# The first is random for each mpirun (version 4); the others may be reused after a while.
JOB_NAMES = ("OMPI_MCA_orte_precondition_transports", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


def _read(around: ProcessContext) -> Reading | Missing | None:
    variables = around.variables
    if not (variables.get("OMPI_COMM_WORLD_RANK") or variables.get("OMPI_COMM_WORLD_SIZE")):
        return None
    job = "-".join(variables[name] for name in JOB_NAMES if variables.get(name))
    return read_mpi("openmpi", variables, NUMBERS, needed=NUMBERS.values(), job=job)


ROW = Environment(
    name="openmpi",
    title="Open MPI",
    sign="OMPI_COMM_WORLD_RANK",
    because="OMPI_COMM_WORLD_RANK is set, as mpirun does",
    names=(*NUMBERS.values(), "MASTER_ADDR", "MASTER_PORT"),
    read=_read,
    set_address="mpirun -x MASTER_ADDR=<machine of rank 0> -x MASTER_PORT=<a free port there> ...",
    # In an allocation mpirun starts its daemons as a step of Slurm: the step's variables number the daemons.
    overrules=frozenset({"slurm"}),
)
