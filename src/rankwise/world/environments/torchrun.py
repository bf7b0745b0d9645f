# SPDX-License-Identifier: Apache-2.0
"""The rows of torch's own variables: set by torchrun (torch elastic's agent), or plain, as ``env://`` reads them.

Plain ones are set by Kubernetes' PyTorchJob, and by wrappers written by hand. Variables in, a value out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.errors import EnvironmentConflict
from rankwise.world.environments import machines, rankwise
from rankwise.world.environments.reading import (
    Environment,
    Missing,
    address,
    integer,
    job_secret,
    parse_integer,
    read_numbers,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    owns=True,
)


ENV_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOCAL_RANK_OPTIONS = ("--local_rank", "--local-rank")


def local_rank_of(variables: Mapping[str, str], argv: Sequence[str]) -> int | None:
    """Return the local rank from ``LOCAL_RANK`` or the script's argument ``--local_rank=N``.

    Raises:
        EnvironmentConflict: both are given and differ.
    """
    from_variable = integer(variables, "LOCAL_RANK")
    from_argument = _local_rank_argument(argv)
    if from_variable is None:
        return from_argument
    if from_argument is not None and from_argument != from_variable:
        raise EnvironmentConflict(
            "The local rank is given twice, with different values.",
            evidence=f"LOCAL_RANK={from_variable} in the environment\n--local_rank={from_argument} in the arguments",
            do="remove one of the two",
        )
    return from_variable


def _local_rank_argument(argv: Sequence[str]) -> int | None:
    for position, word in enumerate(argv[1:], start=1):
        option, equals, value = word.partition("=")
        if option not in LOCAL_RANK_OPTIONS:
            continue
        if not equals:
            value = argv[position + 1] if position + 1 < len(argv) else ""
        return parse_integer(value, option)
    return None


def _read_env(around: ProcessContext) -> Reading | Missing | None:
    variables = around.variables
    # MASTER_ADDR alone is not a launch: Slurm users set it for every step of a job.
    if not (variables.get("RANK") or variables.get("WORLD_SIZE")) or machines.numbers_machines(variables):
        return None
    numbers = {"rank": "RANK", "world_size": "WORLD_SIZE", "local_world_size": "LOCAL_WORLD_SIZE"}
    found = read_numbers("env", variables, numbers, needed=("RANK", "WORLD_SIZE"))
    if isinstance(found, Missing):
        return replace(found, rank=integer(variables, "RANK"), world_size=integer(variables, "WORLD_SIZE"))
    local_rank = local_rank_of(variables, around.argv)
    return replace(found, local_rank=local_rank, address=address(variables), secret=job_secret(variables))


ENV_ROW = Environment(
    name="env",
    title="plain env:// variables",
    sign="RANK",
    because="RANK and WORLD_SIZE are set, but no launcher's own variable",
    names=ENV_NAMES,
    read=_read_env,
    set_address="to run as one rank: env -u RANK -u WORLD_SIZE python ...\n"
    "to run as several: set MASTER_ADDR to rank 0's machine and MASTER_PORT to a free port there, or use a launcher",
)
