# SPDX-License-Identifier: Apache-2.0
"""The variables of other launchers for a rank of rankwise's: scripts and libraries read them directly.

A script written for ``srun python train.py`` reads Slurm's; those of its launcher would make every rank of a machine
the same task. A script written for horovodrun reads Horovod's. Pure. Imported by ``process``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError
from rankwise.world.environments.reading import format_counts, parse_counts
from rankwise.world.environments.slurm import ROW

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.world.environments.reading import Reading

AGENT_PREFIX = "RANKWISE_AGENT_"
"""Prefix of a variable that holds the launcher's value, where the rank has its own."""
SHARED_BY_RANKS = ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")
"""Resources of a task, of which each rank has a part. srun compares them with one another."""


def variables_for_rank(
    around: Mapping[str, str], *, rank: int, local_rank: int, node_rank: int, ranks_per_node: Sequence[int]
) -> dict[str, str]:
    """Return Slurm's variables as srun would set them for one rank if it started each rank itself; none outside Slurm.

    ``around`` are the variables of the launcher. Those that are replaced keep their values under names with the prefix
    ``RANKWISE_AGENT_``.

    Source: srun(1), output environment variables. SLURM_NTASKS, SLURM_NPROCS, SLURM_NTASKS_PER_NODE, SLURM_OVERCOMMIT
    and those of ``SHARED_BY_RANKS`` are also input: they are the defaults of an srun in the rank.
    """
    if not around.get(ROW.sign):
        return {}
    world_size, local_world_size = sum(ranks_per_node), ranks_per_node[node_rank]
    first_rank = sum(ranks_per_node[:node_rank])
    counts = format_counts(ranks_per_node)
    own = {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node_rank),
        "SLURM_NTASKS": str(world_size),
        "SLURM_NPROCS": str(world_size),
    }
    where_set = {
        "SLURM_STEP_NUM_TASKS": str(world_size),
        # With a number of tasks, srun takes it as the maximum per node.
        "SLURM_NTASKS_PER_NODE": str(max(ranks_per_node)),
        "SLURM_TASKS_PER_NODE": counts,
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_GTIDS": ",".join(map(str, range(first_rank, first_rank + local_world_size))),
        **{name: _part(around.get(name, ""), local_world_size) for name in SHARED_BY_RANKS},
    }
    own |= {name: value for name, value in where_set.items() if around.get(name)}
    if _are_more_than_cpus(around, ranks_per_node):
        # srun sets it for tasks that share CPUs, and an srun inside one of them needs it to start as many.
        own["SLURM_OVERCOMMIT"] = "1"
    kept = {f"{AGENT_PREFIX}{name}": around[name] for name in own if around.get(name)}
    return {**own, **kept}


def _part(text: str, num_ranks: int) -> str:
    """Return a rank's part of a task's resources: of ``cpu:8,gres/gpu:a100:4``, for 4, ``cpu:2,...:1``."""
    return re.sub(r"[0-9]+(?=,|$)", lambda match: str(max(1, int(match[0]) // num_ranks)), text)


def _are_more_than_cpus(around: Mapping[str, str], ranks_per_node: Sequence[int]) -> bool:
    name = "SLURM_JOB_CPUS_PER_NODE"
    try:
        return max(ranks_per_node) > min(parse_counts(around[name], name))
    except (KeyError, ConfigurationError):
        return False


def horovod_variables(reading: Reading) -> dict[str, str]:
    """Return horovodrun's variables for a rank; those that ``reading`` leaves open are omitted.

    Source: Horovod 0.28.1, ``horovod/runner/gloo_run.py``. The cross rank is the number of this machine among those
        that have a rank of the same local rank.
    """
    numbers = {
        "RANK": reading.rank,
        "SIZE": reading.world_size,
        "LOCAL_RANK": reading.local_rank,
        "LOCAL_SIZE": reading.local_world_size,
    }
    counts = _ranks_per_node(reading)
    if counts is not None and reading.local_rank is not None and reading.node_rank is not None:
        machines = [number for number, count in enumerate(counts) if count > reading.local_rank]
        numbers |= {"CROSS_RANK": machines.index(reading.node_rank), "CROSS_SIZE": len(machines)}
    return {f"HOROVOD_{name}": str(number) for name, number in numbers.items() if number is not None}


def _ranks_per_node(reading: Reading) -> Sequence[int] | None:
    if reading.ranks_per_node is not None:
        return reading.ranks_per_node
    if reading.num_nodes is None or reading.local_world_size is None:
        return None
    # Machines of different sizes cannot be distinguished here.
    is_even = reading.num_nodes * reading.local_world_size == reading.world_size
    return [reading.local_world_size] * reading.num_nodes if is_even else None
