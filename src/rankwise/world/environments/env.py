# SPDX-License-Identifier: Apache-2.0
"""The row of plain ``env://`` variables: Kubernetes' PyTorchJob, wrappers written by hand. Values in, a value out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankwise.errors import EnvironmentConflict
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

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
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


def _read(around: ProcessContext) -> Reading | Missing | None:
    variables = around.variables
    # MASTER_ADDR alone is not a launch: Slurm users set it for every step of a job.
    if not (variables.get("RANK") or variables.get("WORLD_SIZE")):
        return None
    numbers = {"rank": "RANK", "world_size": "WORLD_SIZE", "local_world_size": "LOCAL_WORLD_SIZE"}
    found = read_numbers("env", variables, numbers, needed=("RANK", "WORLD_SIZE"))
    if isinstance(found, Missing):
        return replace(found, rank=integer(variables, "RANK"), world_size=integer(variables, "WORLD_SIZE"))
    local_rank = local_rank_of(variables, around.argv)
    return replace(found, local_rank=local_rank, address=address(variables), secret=job_secret(variables))


ROW = Environment(
    name="env",
    title="plain env:// variables",
    sign="RANK",
    because="RANK and WORLD_SIZE are set, but no launcher's own variable",
    names=NAMES,
    read=_read,
    set_address="set MASTER_ADDR to rank 0's machine and MASTER_PORT to a free port there",
)
