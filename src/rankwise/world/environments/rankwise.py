# SPDX-License-Identifier: Apache-2.0
"""The row of rankwise's own launcher: the variables of each rank, written and read in one place.

Starts nothing. Imported by the table of this package; the launcher calls ``variables_for``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

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
    overrules=frozenset({"torchrun", "env", "openmpi", "mpich", "slurm", "pmi"}),
)
