# SPDX-License-Identifier: Apache-2.0
"""The row of a Slurm step, started by srun, and parsers of Slurm's lists of machines and tasks.

Reads variables from a mapping; calls no Slurm command.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError
from rankwise.world.environments.reading import (
    Environment,
    Missing,
    checked_port,
    file_name,
    given,
    integer,
    job_secret,
    parse_counts,
    read_numbers,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rankwise.world.environments.reading import ProcessContext, Reading

TASKS = "SLURM_STEP_TASKS_PER_NODE"
"""On one machine all tasks are there, and it may be absent."""
STEP_NAMES = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_STEP_NODELIST",
    TASKS,
)
NUMBERS = {"rank": "SLURM_PROCID", "world_size": "SLURM_STEP_NUM_TASKS", "local_rank": "SLURM_LOCALID"}
FIRST_PORT = 20000
NUM_PORTS = 10000


def hosts(text: str) -> Iterator[str]:
    """Yield the machines of a Slurm list in order: ``n[08-10,2],x`` is n08 n09 n10 n2 x.

    Raises:
        ConfigurationError: the list cannot be read.
    """
    # Commas inside brackets do not separate hosts.
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if not parts or ",".join(parts) != text:
        raise _bad_list(text)
    for part in parts:
        yield from _expanded(part, text)


def _expanded(part: str, text: str) -> Iterator[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield before
        return
    inside, _, after = rest.partition("]")
    for piece in inside.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", piece)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise _bad_list(text)
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            for tail in _expanded(after, text):
                yield f"{before}{number:0{len(match[1])}d}{tail}"


def _bad_list(text: str) -> ConfigurationError:
    return ConfigurationError(f"{text!r} is not a Slurm list of machines.", do="use the form gpu[001-003,7],login1")


def step_port(job_id: int, step_id: int) -> int:
    """Return the port of a step's store, from 20000 to 29999, if the user gives none.

    Every machine must know it before any of them can communicate, so it is computed. Steps of one job, and jobs
    submitted one after another, get different ports.
    """
    return FIRST_PORT + (job_id * 101 + step_id) % NUM_PORTS


def is_leftover(variables: Mapping[str, str]) -> bool:
    """Whether the step's variables were inherited from a step that submitted this job with sbatch.

    srun sets SLURM_TASKS_PER_NODE to the step's tasks; a batch script's is the job's.
    """
    job, step = variables.get("SLURM_TASKS_PER_NODE"), variables.get("SLURM_STEP_TASKS_PER_NODE")
    return bool(job and step and job != step)


def _read(around: ProcessContext) -> Reading | Missing | None:
    variables = around.variables
    # A batch script has SLURM_PROCID=0 and no step: no ranks were started there.
    if not variables.get("SLURM_STEP_ID") or is_leftover(variables):
        return None
    if not variables.get(TASKS) and _is_one_machine(variables):
        variables = {**variables, TASKS: variables.get("SLURM_STEP_NUM_TASKS") or ""}
    found = read_numbers("slurm", variables, NUMBERS, needed=STEP_NAMES)
    if isinstance(found, Missing):
        return found
    node_rank = given(variables, "SLURM_NODEID")
    counts = parse_counts(variables[TASKS], TASKS)
    if sum(counts) != found.world_size or node_rank >= len(counts):
        raise ConfigurationError(
            "The Slurm variables of this step are inconsistent.",
            evidence=" ".join(f"{name}={variables[name]}" for name in STEP_NAMES),
            do="start the ranks as one step: srun --ntasks=N python train.py",
        )
    job_id, step_id = given(variables, "SLURM_JOB_ID"), given(variables, "SLURM_STEP_ID")
    attempt = integer(variables, "SLURM_RESTART_COUNT") or 0
    return replace(
        found,
        local_world_size=counts[node_rank],
        node_rank=node_rank,
        num_nodes=len(counts),
        ranks_per_node=tuple(counts),
        address=_address(variables, num_nodes=len(counts)),
        secret=job_secret(variables),
        # The number of a job is reused if the controller is reinstalled; the name of its cluster is not.
        job_key=file_name(f"slurm-{variables.get('SLURM_CLUSTER_NAME', '')}-{job_id}.{step_id}.{attempt}"),
        attempt=str(attempt),
    )


def _is_one_machine(variables: Mapping[str, str]) -> bool:
    machines = variables.get("SLURM_STEP_NODELIST")
    return bool(machines) and len(list(islice(hosts(machines), 2))) == 1


def _address(variables: Mapping[str, str], *, num_nodes: int) -> tuple[str, int] | None:
    host, port = variables.get("MASTER_ADDR"), integer(variables, "MASTER_PORT")
    if num_nodes == 1 and not (host and port is not None):
        return None
    if port is None:
        port = step_port(given(variables, "SLURM_JOB_ID"), given(variables, "SLURM_STEP_ID"))
    return host or next(hosts(variables["SLURM_STEP_NODELIST"])), checked_port(port, "MASTER_PORT")


ROW = Environment(
    name="slurm",
    title="Slurm",
    sign="SLURM_JOB_ID",
    because="the variables of a Slurm step are set, as srun does for each task",
    names=(*STEP_NAMES, "MASTER_ADDR", "MASTER_PORT", "SLURM_RESTART_COUNT"),
    read=_read,
    set_address="export MASTER_ADDR and MASTER_PORT before srun",
)
