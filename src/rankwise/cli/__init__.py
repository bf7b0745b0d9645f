# SPDX-License-Identifier: Apache-2.0
"""The command line: words in, text and an exit code out. One module per command, no logic.

The only place that prints. Imports no torch: a mistake in a command is told at once.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from rankwise.cli import doctor, env, horovodrun, run, stacks, submit
from rankwise.errors import RankwiseError

if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE_ERROR = 2
"""Exit code where nothing was started."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``rankwise`` command and return its exit code.

    Args:
        argv: the words after ``rankwise``; ``None`` takes them from ``sys.argv``.
    """
    options = _parser().parse_args(argv)
    try:
        return options.execute(options)
    except RankwiseError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return USAGE_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankwise",
        description="One PyTorch training script on any number of ranks.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    run.add_to(commands.add_parser)
    doctor.add_to(commands.add_parser)
    env.add_to(commands.add_parser)
    stacks.add_to(commands.add_parser)
    submit.add_to(commands.add_parser)
    horovodrun.add_to(commands.add_parser)
    return parser
