# SPDX-License-Identifier: Apache-2.0
"""The row of rankwise's own launcher: the variables of each rank, written and read in one place; also other launchers'.

Starts nothing. Imported by the table of this package; the launcher calls ``variables_for``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError
from rankwise.world.environments import slurm
from rankwise.world.environments.reading import (
    SECRET_NAME,
    Environment,
    Missing,
    format_counts,
    job_secret,
    parse_address,
    parse_counts,
    read_numbers,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.world.environments.reading import ProcessContext, Reading

TORCHRUN_JOB = "TORCHELASTIC_RUN_ID"

NUMBERS = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "node_rank": "GROUP_RANK",
    "num_nodes": "GROUP_WORLD_SIZE",
}
"""Torchrun's variables, which this launcher sets too."""
NAMES = ("RANKWISE_RUN_ID", *NUMBERS.values(), "RANKWISE_STORE", "RANKWISE_ATTEMPT")
RANKS_PER_NODE = "RANKWISE_RANKS_PER_NODE"
OWN_NAMES = (
    *NAMES,
    RANKS_PER_NODE,
    SECRET_NAME,
    "RANKWISE_ERROR_FILE",
    "RANKWISE_STACK_FILE",
    "RANKWISE_CHECK",
    "RANKWISE_GUARD",
    "RANKWISE_REPORT",
    "RANKWISE_LAUNCHER",
)
"""What the launcher sets for one job. Users set some of them too, and it sets those as they have."""


def is_below_torchrun(variables: Mapping[str, str]) -> bool:
    """Return whether a torchrun started by a rankwise rank is between that rank and this process."""
    torchrun_job = variables.get(TORCHRUN_JOB)
    return bool(torchrun_job) and torchrun_job != variables.get("RANKWISE_RUN_ID")


def is_own(variables: Mapping[str, str]) -> bool:
    """Return whether the variables of torchrun in ``variables`` were set by rankwise's launcher."""
    return bool(variables.get(TORCHRUN_JOB)) and not is_below_torchrun(variables)


def variables_for(
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    node_rank: int,
    num_nodes: int,
    ranks_per_node: Sequence[int] = (),
    store: tuple[str, int],
    run_id: str,
    attempt: str,
    error_file: str,
    stack_file: str = "",
    torch_error_file: str = "",
    max_restarts: int = 0,
    master: tuple[str, int] | None = None,
    master_is_served: bool = False,
    secret: str | None = None,
    interface: str | None = None,
    check: bool = False,
    guard: bool = False,
    report: str | None = None,
    launcher: str = "",
) -> dict[str, str]:
    """Return the variables that the launcher sets for one rank; ``read`` parses them.

    Torchrun's names are among them: other libraries recognize a launcher by ``TORCHELASTIC_RUN_ID`` and use the
    rest. Only rankwise's launcher gives both names of the job the same value, which ``read`` relies on.

    The numbers are as in :class:`~rankwise.world.environments.reading.Reading`. Of the rest:

    - ``store``: host and port of the store that the launcher serves; ``secret``: what it requires, if it has one.
    - ``run_id``, ``attempt``: name of the job, and number of its restart, ``"0"`` at first, the same on every rank.
    - ``error_file``, ``stack_file``: where the rank writes its failure, and its stack on request. ``torch_error_file``:
      where torch's ``@record`` writes a failure; rankwise does not read it.
    - ``master``: host and port of torch's store; ``None`` repeats ``store``, which torch's client cannot use.
      ``master_is_served``: whether it is already served, so that no rank serves one there.
    - ``interface``: network interface to the other machines, if there are any.
    - ``check``: whether ranks compare their collectives before they send; ``guard``: whether the ranks of a
      torch.distributed script compare what their optimizers step.
    - ``report``: the folder in which ranks record their steps, or ``"off"``. ``launcher``: what the launcher calls
      itself among the events in that folder.
    """
    host, port = store
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(node_rank),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "MASTER_ADDR": (master or store)[0],
        "MASTER_PORT": str((master or store)[1]),
        **({"TORCHELASTIC_USE_AGENT_STORE": "True"} if master_is_served else {}),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        TORCHRUN_JOB: run_id,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_ERROR_FILE": torch_error_file,
        "RANKWISE_RUN_ID": run_id,
        "RANKWISE_STORE": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        "RANKWISE_ATTEMPT": attempt,
        "RANKWISE_ERROR_FILE": error_file,
        **({RANKS_PER_NODE: format_counts(ranks_per_node)} if ranks_per_node else {}),
        **({"RANKWISE_STACK_FILE": stack_file} if stack_file else {}),
        **({SECRET_NAME: secret} if secret else {}),
        **({"RANKWISE_CHECK": "1"} if check else {}),
        **({"RANKWISE_GUARD": "1"} if guard else {}),
        **({"RANKWISE_REPORT": report, "RANKWISE_LAUNCHER": launcher} if report else {}),
        **({"GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface} if interface else {}),
        # NCCL takes a bare name as a prefix.
        **({"NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}),
    }


def echo_note(error_file: str) -> str:
    """Return the file that a rank creates if it fails only because another one did.

    Args:
        error_file: path the rank writes its failure to.
    """
    return str(Path(error_file).with_suffix(".echo"))


def _read(around: ProcessContext) -> Reading | Missing | None:
    variables = around.variables
    if not variables.get("RANKWISE_RUN_ID") or is_below_torchrun(variables):
        return None
    found = read_numbers("rankwise", variables, NUMBERS, needed=NAMES)
    if isinstance(found, Missing):
        return found
    counts = variables.get(RANKS_PER_NODE)
    return replace(
        found,
        ranks_per_node=tuple(parse_counts(counts, RANKS_PER_NODE)) if counts else None,
        address=parse_address(variables["RANKWISE_STORE"], "RANKWISE_STORE"),
        secret=job_secret(variables),
        store_is_served=True,
        attempt=variables["RANKWISE_ATTEMPT"],
    )


ROW = Environment(
    name="rankwise",
    title="rankwise",
    sign="RANKWISE_RUN_ID",
    because="RANKWISE_RUN_ID is set, as only rankwise's launcher does",
    names=NAMES,
    read=_read,
    set_address="start the script with `rankwise run`, which sets RANKWISE_STORE",
    owns=True,
)


# -- the variables of other launchers for a rank: scripts and libraries read them directly ----------------------
#
# A script written for ``srun python train.py`` reads Slurm's; those of its launcher would make every rank of a machine
# the same task. A script written for horovodrun reads Horovod's.

AGENT_PREFIX = "RANKWISE_AGENT_"
"""Prefix of a variable that holds the launcher's value, where the rank has its own."""
SHARED_BY_RANKS = ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")
"""Resources of a task, of which each rank has a part. srun compares them with one another."""


def slurm_variables(
    around: Mapping[str, str], *, rank: int, local_rank: int, node_rank: int, ranks_per_node: Sequence[int]
) -> dict[str, str]:
    """Return Slurm's variables as srun would set them for one rank if it started each rank itself; none outside Slurm.

    ``around`` are the variables of the launcher. Those that are replaced keep their values under names with the prefix
    ``RANKWISE_AGENT_``.

    Source: srun(1), output environment variables. SLURM_NTASKS, SLURM_NPROCS, SLURM_NTASKS_PER_NODE, SLURM_OVERCOMMIT
    and those of ``SHARED_BY_RANKS`` are also input: they are the defaults of an srun in the rank.
    """
    if not around.get(slurm.ROW.sign):
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
