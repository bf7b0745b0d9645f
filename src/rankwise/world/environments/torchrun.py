# SPDX-License-Identifier: Apache-2.0
"""The row of torchrun and ``python -m torch.distributed.launch``: torch elastic's agent. Variables in, a value out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.world.environments import rankwise
from rankwise.world.environments.reading import Environment, Missing, address, read_numbers

if TYPE_CHECKING:
    from rankwise.world.environments.reading import ProcessContext, Reading

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _read(around: ProcessContext) -> Reading | Missing | None:
    variables = around.variables
    if not variables.get("TORCHELASTIC_RUN_ID") or rankwise.is_own(variables):
        return None
    found = read_numbers("torchrun", variables, rankwise.NUMBERS, needed=REQUIRED)
    if isinstance(found, Missing):
        return found
    return replace(
        found,
        local_rank=_local_rank(found),
        address=address(variables),
        store_is_served=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        # The agents of several machines count their restarts separately: the count identifies no attempt there.
        attempt=variables.get("TORCHELASTIC_RESTART_COUNT", "0") if found.num_nodes == 1 else "0",
    )


def _local_rank(found: Reading) -> int | None:
    """Return the number among the ranks of the machine, which ``--virtual-local-rank`` reports as 0 on every rank.

    torchrun numbers the ranks machine by machine. ``None`` if the machines have unequal numbers of ranks: then only
    the ranks together can tell.
    """
    size = found.local_world_size
    if found.local_rank != 0 or found.node_rank is None or size is None or found.num_nodes is None:
        return found.local_rank
    if found.world_size != size * found.num_nodes:
        return None
    local_rank = found.rank - found.node_rank * size
    return local_rank if 0 <= local_rank < size else 0


ROW = Environment(
    name="torchrun",
    title="torchrun",
    sign="TORCHELASTIC_RUN_ID",
    because="TORCHELASTIC_RUN_ID is set, which only torch elastic's agent does",
    names=(
        *rankwise.NUMBERS.values(),
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_RESTART_COUNT",
    ),
    read=_read,
    set_address="start the script with torchrun, which sets MASTER_ADDR and MASTER_PORT",
    overrules=frozenset({"env", "openmpi", "mpich", "slurm", "pmi"}),
)
