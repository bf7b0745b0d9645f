# SPDX-License-Identifier: Apache-2.0
"""The command line: arguments in, text and an exit code out. No logic.

The only place that prints. Does not import torch: a mistake in a command is reported immediately.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

from rankwise.cli.arguments import equivalents, options_of, similar
from rankwise.errors import RankwiseError
from rankwise.log import RED, colored
from rankwise.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.cli.arguments import Command

COMMANDS = {
    "run": ("run", "RUN"),
    "report": ("report", "REPORT"),
    "show": ("report", "SHOW"),
    "top": ("top", "TOP"),
    "verify": ("verify", "COMMAND"),
    "doctor": ("doctor", "DOCTOR"),
    "env": ("doctor", "ENV"),
    "stacks": ("top", "STACKS"),
    "submit": ("run", "SUBMIT"),
    "horovodrun": ("horovodrun", "COMMAND"),
    "completion": ("completion", "COMMAND"),
}
"""Module and name of each command, in the order of ``--help``."""
EXAMPLES = """\
examples:
  rankwise run -n 4 train.py        four ranks of a script on this machine
  rankwise run -n 4 --auto train.py the same for a script that was written for one device
  rankwise verify train.py          do two ranks compute what one computes?
  rankwise doctor                   is this machine ready?
  rankwise run --help               all options of a command, with examples

documentation: docs/index.md in the repository of rankwise, or `make docs` for the site"""
USAGE_ERROR = 2
"""Exit code if nothing was started."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``rankwise`` command and return its exit code.

    Args:
        argv: the arguments after ``rankwise``; ``None`` takes them from ``sys.argv``.
    """
    words = sys.argv[1:] if argv is None else argv
    if not words:
        _parser().print_help()
        return 0
    options = _options(words)
    try:
        return options.execute(options)
    except RankwiseError as error:
        name = colored(type(error).__name__, RED, is_terminal=sys.stderr.isatty())
        sys.stderr.write(f"{name}: {error}\n")
        return USAGE_ERROR


def _options(words: Sequence[str]) -> argparse.Namespace:
    # To import the others takes as long as to start Python.
    parser = _parser(words[:1] if words and words[0] in COMMANDS else tuple(COMMANDS))
    if words and words[0].endswith(".py"):
        parser.error(f"{words[0]} is not a command; to run it: rankwise run {words[0]}")
    if words[0] not in COMMANDS and not words[0].startswith("-"):
        parser.error(f"{words[0]!r} is not a command{similar(words[0], COMMANDS)}; rankwise --help lists them")
    options, unknown = parser.parse_known_args(words)
    if unknown:
        parts = [f"unrecognized arguments: {' '.join(unknown)}", *equivalents(unknown)]
        command = options.parser
        if len(parts) == 1:
            parts[0] += similar(unknown[0].partition("=")[0], options_of(command))
        command.error("\n  ".join(parts))
    return options


def _command(name: str) -> Command:
    module, constant = COMMANDS[name]
    command: Command = getattr(importlib.import_module(f"rankwise.cli.{module}"), constant)
    return command


def parsers() -> dict[str, tuple[str, argparse.ArgumentParser]]:
    """Return each command's help in one line, and its parser."""
    found: dict[str, tuple[str, argparse.ArgumentParser]] = {}
    for command in map(_command, COMMANDS):
        parser = argparse.ArgumentParser(prog=f"rankwise {command.name}")
        command.add_options(parser)
        found[command.name] = command.help, parser
    return found


def _parser(names: Sequence[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankwise",
        description="One PyTorch training script on any number of ranks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rankwise {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in map(_command, names):
        known = commands.add_parser(
            command.name,
            help=command.help,
            description=command.description,
            epilog=command.epilog,
            usage=command.usage,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_options(known)
        # An unknown option shows the usage of that command.
        known.set_defaults(execute=command.execute, parser=known)
    return parser
