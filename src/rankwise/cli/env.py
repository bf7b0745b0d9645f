# SPDX-License-Identifier: Apache-2.0
"""``rankwise env``: what started this process, and which variables show it. Starts and joins nothing."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from rankwise.world.environments.process import explain_process
from rankwise.world.environments.reading import Reading

if TYPE_CHECKING:
    import argparse

    from rankwise.world.environments.table import Explanation, Row

HELP = "show what started this process, and which variables show it"
DESCRIPTION = """\
Show which rank this process would be, what started it, and the result for each environment that rankwise knows.

Start it the way you start the script; each process reports for itself."""
EPILOG = """\
examples:
  rankwise env                  in a shell: no launcher, a world of one
  srun rankwise env             in a step of Slurm
  mpirun -n 2 rankwise env      under Open MPI or MPICH
  torchrun --nproc-per-node 2 -m rankwise env

The exit code is 1 if this could not be decided: the script would fail with the error shown."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def execute(options: argparse.Namespace) -> int:
    """Print the explanation in one write, so that the output of several ranks does not interleave."""
    explanation = explain_process()
    sys.stdout.write(as_json(explanation) + "\n" if options.json else as_text(explanation))
    return 0 if explanation.decided is not None else 1


def as_json(explanation: Explanation) -> str:
    """Return the explanation as one line of JSON, without the secret."""
    decided = explanation.decided
    return json.dumps(
        {
            "decided": None
            if decided is None
            else {one.name: getattr(decided, one.name) for one in fields(Reading) if one.repr},
            "error": explanation.error,
            "rows": [
                {
                    "name": row.name,
                    "verdict": row.verdict,
                    "rank": row.rank,
                    "world_size": row.world_size,
                    "variables": dict(row.variables),
                    "why": row.why,
                }
                for row in explanation.rows
            ],
            "secret_is_set": explanation.secret_is_set,
        }
    )


def as_text(explanation: Explanation) -> str:
    """Return the explanation as text of several lines."""
    lines = _decided(explanation)
    width = max(len(row.title) for row in explanation.rows)
    verdict_width = max(len(row.verdict) for row in explanation.rows)
    lines.append("checked, in this order:")
    for row in explanation.rows:
        lines.append(f"  {row.title:<{width}}  {row.verdict:<{verdict_width}}  {_numbers(row)}{row.why}")
        if row.variables:
            told = " ".join(f"{name}={value}" for name, value in row.variables)
            lines.append(f"  {'':<{width}}  {'':<{verdict_width}}  {told}")
    lines.append(f"RANKWISE_SECRET is {'set' if explanation.secret_is_set else 'not set'}")
    return "\n".join(lines) + "\n"


def _decided(explanation: Explanation) -> list[str]:
    reading = explanation.decided
    if reading is None:
        lines = str(explanation.error).splitlines()
        return ["undecided; the script would fail with:", *(f"  {line}" for line in lines)]
    store = "none" if reading.world_size == 1 else "a file of the job on this machine"
    if reading.file is not None:
        store = f"the file {reading.file}"
    elif reading.address is not None:
        served_by = "the launcher" if reading.store_is_served else "rank 0"
        store = f"{reading.address[0]}, port {reading.address[1]}, served by {served_by}"
    return [
        f"rank {reading.rank} of {reading.world_size}, started by {reading.source}",
        f"  local rank  {_of(reading.local_rank, reading.local_world_size, reading)}",
        f"  node        {_of(reading.node_rank, reading.num_nodes, reading)}",
        f"  store       {store}",
        f"  attempt     {reading.attempt}",
        f"  because     {reading.reason}",
    ]


def _of(number: int | None, total: int | None, reading: Reading) -> str:
    if reading.world_size == 1:
        return "0 of 1"
    if number is None and total is None:
        return "known once the ranks join"
    return f"{'?' if number is None else number} of {'?' if total is None else total}"


def _numbers(row: Row) -> str:
    if row.rank is None or row.world_size is None:
        return ""
    return f"rank {row.rank} of {row.world_size}; "
