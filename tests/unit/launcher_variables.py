# SPDX-License-Identifier: Apache-2.0
"""What launchers set: captured from real ones, and the smallest set of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.world.environments.rankwise import variables_for

if TYPE_CHECKING:
    from rankwise.world.environments.reading import Reading


GOLDEN = Path(__file__).parent / "golden" / "environments"


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


PLAIN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "7",
}


HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


SLURM = {
    "SLURM_CLUSTER_NAME": "lab",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4",
}


OWN = variables_for(
    rank=1,
    world_size=4,
    local_rank=1,
    local_world_size=2,
    node_rank=0,
    num_nodes=2,
    store=("127.0.0.1", 4321),
    run_id="job",
    attempt="2",
    error_file="/tmp/error.json",  # noqa: S108 - only a name
)


def golden(name: str) -> list[dict[str, Any]]:
    processes: list[dict[str, Any]] = json.loads((GOLDEN / f"{name}.json").read_text())["processes"]
    return processes


def facts(reading: Reading) -> tuple[int | None, ...]:
    return (
        reading.rank,
        reading.world_size,
        reading.local_rank,
        reading.local_world_size,
        reading.node_rank,
        reading.num_nodes,
    )


ALONE = [(0, 1, None, None, None, None)]
