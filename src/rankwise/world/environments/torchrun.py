# SPDX-License-Identifier: Apache-2.0
"""The row of torchrun and ``python -m torch.distributed.launch``: torch elastic's agent.

Reads variables from a mapping, nothing else. Imported by the table of this package.
"""

from __future__ import annotations

from rankwise.world.environments import rankwise
from rankwise.world.environments.reading import (
    Environment,
    Missing,
    ProcessContext,
    Reading,
    address,
    given,
    integer,
    required,
)

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
)


def _read(around: ProcessContext) -> Reading | Missing | None:
    variables = around.variables
    if not variables.get("TORCHELASTIC_RUN_ID") or rankwise.is_own(variables):
        return None
    missing = required(variables, REQUIRED)
    if missing is not None:
        return missing
    num_nodes = integer(variables, "GROUP_WORLD_SIZE")
    # The agents of several machines count their restarts separately, so the count identifies no attempt
    # there.
    attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "0") if num_nodes == 1 else "0"
    return Reading(
        rank=given(variables, "RANK"),
        world_size=given(variables, "WORLD_SIZE"),
        local_rank=integer(variables, "LOCAL_RANK"),
        local_world_size=integer(variables, "LOCAL_WORLD_SIZE"),
        node_rank=integer(variables, "GROUP_RANK"),
        num_nodes=num_nodes,
        address=address(variables),
        store_is_served=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        source="torchrun",
        attempt=attempt,
    )


ROW = Environment(
    name="torchrun",
    title="torchrun",
    sign="TORCHELASTIC_RUN_ID",
    because="TORCHELASTIC_RUN_ID is set, which only torch elastic's agent does",
    names=NAMES,
    read=_read,
    set_address="start the script with torchrun, which sets MASTER_ADDR and MASTER_PORT",
    overrules=frozenset({"env", "openmpi", "mpich", "slurm", "pmi"}),
)
