# SPDX-License-Identifier: Apache-2.0
"""The words of the command that ranks run, which end the options of ours."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class TakeCommand(argparse.Action):
    """Takes a script or module and all that follows, as it stands: a later ``--`` is the script's."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,  # noqa: ARG002 - it has none
    ) -> None:
        """Set ``target`` and ``arguments``."""
        words = [str(word) for word in values or ()]
        # The first one only says that our options are over.
        if words[:1] == ["--"]:
            words = words[1:]
        if not words:
            parser.error("a script or a module is missing")
        namespace.target, namespace.arguments = words[0], words[1:]


def add_command(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the script or module, with its arguments, to a command's options; ``what`` says what becomes of it."""
    parser.add_argument("command", nargs=argparse.PARSER, metavar="script.py | module", action=TakeCommand, help=what)
