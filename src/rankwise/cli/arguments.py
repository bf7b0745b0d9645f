# SPDX-License-Identifier: Apache-2.0
"""The words of the command that ranks run, which end the options of ours; and what others call our options."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


_OURS = {
    "nproc-per-node": "-n is how many ranks of this machine",
    "num-processes": "-n is how many ranks of this machine",
    "nnodes": "--nodes is how many machines",
    "num-machines": "--nodes is how many machines",
    "rdzv-endpoint": "--rendezvous is where machines meet, as HOST:PORT",
    "master-addr": "--rendezvous is where machines meet, as HOST:PORT",
    "master-port": "--rendezvous is where machines meet, as HOST:PORT",
    "main-process-ip": "--rendezvous is where machines meet, as HOST:PORT",
    "machine-rank": "--node-rank is the number of this machine",
    "rdzv-backend": "--rendezvous is all that the machines need; leave the backend out",
    "rdzv-id": "--rendezvous is all that the machines need; leave the id out",
    "standalone": "ranks of one machine need no option for it; leave it out",
}
"""Options of torchrun and accelerate, and ours for the same."""


def equivalents(unknown: Sequence[str]) -> list[str]:
    """Return what the options of other launchers among ``unknown`` are called here, a line each."""
    names = [word.partition("=")[0].lstrip("-").replace("_", "-") for word in unknown if word.startswith("-")]
    return list(dict.fromkeys(_OURS[name] for name in names if name in _OURS))


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
