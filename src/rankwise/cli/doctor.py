# SPDX-License-Identifier: Apache-2.0
"""``rankwise doctor``: its options and its output. Runs no check itself."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from rankwise.doctor.examine import Examination

DEFAULT_PORT = 29500
HELP = "check these machines for problems before training"
DESCRIPTION = """\
Check this machine or, when started by a launcher, all machines of a job together.

Each line is ok, a warning or an error, with what to do next. The exit code is 1 if there is an error."""
EPILOG = """\
examples:
  rankwise doctor                              this machine
  rankwise run -n 2 -m rankwise doctor         two ranks of this machine
  srun rankwise doctor --shared /scratch/me    every task of a Slurm step, and a folder all must see
  mpirun -n 4 rankwise doctor
  torchrun --nproc-per-node 2 -m rankwise doctor"""


def add_options(parser: argparse.ArgumentParser) -> None:
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


def execute(options: argparse.Namespace) -> int:
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
    lines.append(", ".join(told) if told else "nothing found")
    return "\n".join(lines) + "\n"
