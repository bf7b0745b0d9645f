# SPDX-License-Identifier: Apache-2.0
"""``rankwise doctor`` and ``rankwise env``: their options and their output.

Runs no check itself. ``env`` shows what started this process, and which variables show it; it starts and joins nothing.
"""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from rankwise.cli.arguments import Command
from rankwise.world.environments.process import explain_process
from rankwise.world.environments.reading import Reading
from rankwise.world.environments.table import ABSENT, NOBODY

if TYPE_CHECKING:
    import argparse

    from rankwise.doctor.examine import Examination
    from rankwise.world.environments.table import Explanation, Row

DEFAULT_PORT = 29500


def _add_doctor_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--shared", metavar="DIR", default="", help="a folder that every host must see")
    parser.add_argument(
        "--timeout", type=float, default=30.0, metavar="SECONDS", help="how long to wait for ranks (default: 30)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        metavar="P",
        help=f"a port that must be free if no ranks were started (default: {DEFAULT_PORT})",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON, with all facts")


def _run_doctor(options: argparse.Namespace) -> int:
    """Run the checks, print on the reporting rank, and return 1 if there was an error."""
    # Imports torch, which no other command needs.
    from rankwise.doctor.examine import examine  # noqa: PLC0415

    examination = examine(timeout_seconds=options.timeout, port=options.port, shared_folder=options.shared)
    if not examination.speaks:
        return 0
    sys.stdout.write(as_json(examination) + "\n" if options.json else as_text(examination))
    sys.stdout.flush()
    return 1 if any(finding.level == "error" for finding in examination.findings) else 0


def as_json(examination: Examination) -> str:
    """Return findings and facts as one line of JSON."""
    job = asdict(examination.job)
    return json.dumps({"findings": [asdict(finding) for finding in examination.findings], **job})


def as_text(examination: Examination) -> str:
    """Return the findings as a table."""
    from rankwise.doctor.checks import told_ranks  # noqa: PLC0415 - as above

    findings = examination.findings
    width = max(len(finding.check) for finding in findings)
    lines = [f"rankwise doctor: {told_ranks(examination.job.ranks)}"]
    for finding in findings:
        lines.append(f"  {finding.level:<7}  {finding.check:<{width}}  {finding.what}")
        for name, text in (("", finding.evidence), ("do: ", finding.do)):
            lines.extend(f"  {'':<7}  {'':<{width}}  {name}{line}" for line in text.splitlines())
    counts = {level: sum(finding.level == level for finding in findings) for level in ("error", "warning")}
    told = [f"{number} {level}{'' if number == 1 else 's'}" for level, number in counts.items() if number]
    lines.append(", ".join(told) if told else "no problem found")
    return "\n".join(lines) + "\n"


DOCTOR = Command(
    name="doctor",
    help="check these machines for problems before training",
    description="""\
Check this machine or, when started by a launcher, all machines of a job together.

Each line is ok, a warning or an error, with what to do next. The exit code is 1 if there is an error.""",
    epilog="""\
examples:
  rankwise doctor                              this machine
  rankwise run -n 2 -m rankwise doctor         two ranks of this machine
  srun rankwise doctor --shared /scratch/me    every task of a Slurm step, and a folder all must see
  mpirun -n 4 rankwise doctor
  torchrun --nproc-per-node 2 -m rankwise doctor""",
    add_options=_add_doctor_options,
    execute=_run_doctor,
)


def _add_env_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def _run_env(options: argparse.Namespace) -> int:
    """Print the explanation in one write, so that the output of several ranks does not interleave."""
    explanation = explain_process()
    sys.stdout.write(env_as_json(explanation) + "\n" if options.json else env_as_text(explanation))
    return 0 if explanation.decided is not None else 1


def env_as_json(explanation: Explanation) -> str:
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


def env_as_text(explanation: Explanation) -> str:
    """Return the explanation as text of several lines."""
    lines = _decided(explanation)
    # Most are not there: their titles are enough.
    present = [row for row in explanation.rows if row.verdict != ABSENT or row.variables]
    width = max((len(row.title) for row in present), default=0)
    verdict_width = max((len(row.verdict) for row in present), default=0)
    lines.append("checked, in this order:")
    for row in present:
        lines.append(f"  {row.title:<{width}}  {row.verdict:<{verdict_width}}  {_numbers(row)}{row.why}")
        if row.variables:
            told = " ".join(f"{name}={value}" for name, value in row.variables)
            lines.append(f"  {'':<{width}}  {'':<{verdict_width}}  {told}")
    absent = ", ".join(row.title for row in explanation.rows if row not in present)
    lines.extend(textwrap.wrap(f"not there: {absent}", width=100, initial_indent="  ", subsequent_indent="    "))
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
        f"rank {reading.rank} of {reading.world_size}, {_started_by(reading)}",
        f"  local rank  {_of(reading.local_rank, reading.local_world_size, reading)}",
        f"  node        {_of(reading.node_rank, reading.num_nodes, reading)}",
        f"  store       {store}",
        f"  attempt     {reading.attempt}",
        f"  because     {reading.reason}",
    ]


def _started_by(reading: Reading) -> str:
    return "no launcher: a world of one rank" if reading.source == NOBODY else f"started by {reading.source}"


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


ENV = Command(
    name="env",
    help="show what started this process, and which variables show it",
    description="""\
Show which rank this process would be, what started it, and the result for each environment that rankwise knows.

Start it the way you start the script; each process reports for itself.""",
    epilog="""\
examples:
  rankwise env                  in a shell: no launcher, a world of one
  srun rankwise env             in a step of Slurm
  mpirun -n 2 rankwise env      under Open MPI or MPICH
  torchrun --nproc-per-node 2 -m rankwise env

The exit code is 1 if this could not be decided: the script would fail with the error shown.""",
    add_options=_add_env_options,
    execute=_run_env,
)
