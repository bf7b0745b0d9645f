# SPDX-License-Identifier: Apache-2.0
"""The row of Open MPI's mpirun.

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
    job_secret,
    required,
)

# OMPI_COMM_WORLD_NODE_RANK is not read: it numbers the processes of a machine, not the machines.
REQUIRED = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
# The first is random for each mpirun (version 4); the others may be reused after a while.
JOB_NAMES = ("OMPI_MCA_orte_precondition_transports", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


def _read(around: ProcessContext) -> Reading | Missing | None:
    variables = around.variables
    if not (variables.get("OMPI_COMM_WORLD_RANK") or variables.get("OMPI_COMM_WORLD_SIZE")):
        return None
    missing = required(variables, REQUIRED)
    if missing is not None:
        return missing
    world_size = given(variables, "OMPI_COMM_WORLD_SIZE")
    local_world_size = given(variables, "OMPI_COMM_WORLD_LOCAL_SIZE")
    one_machine = local_world_size == world_size
    job = "-".join(variables[name] for name in JOB_NAMES if variables.get(name))
    return Reading(
        rank=given(variables, "OMPI_COMM_WORLD_RANK"),
        world_size=world_size,
        local_rank=given(variables, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_world_size=local_world_size,
        node_rank=0 if one_machine else None,
        num_nodes=1 if one_machine else None,
        address=address(variables),
        secret=job_secret(variables),
        job_key=file_name(f"openmpi-{job}") if job else None,
        source="openmpi",
    )


ROW = Environment(
    name="openmpi",
    title="Open MPI",
    sign="OMPI_COMM_WORLD_RANK",
    because="OMPI_COMM_WORLD_RANK is set, as mpirun does",
    names=(*REQUIRED, "MASTER_ADDR", "MASTER_PORT"),
    read=_read,
    set_address="mpirun -x MASTER_ADDR=<machine of rank 0> -x MASTER_PORT=<a free port there> ...",
    # In an allocation mpirun starts its daemons as a step of Slurm: the step's variables number the
    # daemons.
    overrules=frozenset({"slurm"}),
)
