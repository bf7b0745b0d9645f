# SPDX-License-Identifier: Apache-2.0
"""Which scripts accept ``--local_rank`` as an option, as those written for torch.distributed.launch do.

Reads a script's source, runs nothing. Imported by ``entrypoint``, which passes each rank its number.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SPELLINGS = ("--local_rank", "--local-rank")
"""Torch's launcher passed the first until 2.0, and passes the second since."""


def option_in(source: bytes) -> str | None:
    """Return the spelling that the parser of a script accepts, or ``None`` if it accepts none.

    Only what the source itself declares counts, by ``add_argument`` of a parser without subcommands: an option that
    a parser does not know would end a script.

    Args:
        source: of the script, valid Python.
    """
    if not any(spelling.encode() in source for spelling in SPELLINGS):
        return None
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    if any(_method(call) == "add_subparsers" for call in calls):
        return None
    declared = (
        word for call in calls if _method(call) == "add_argument" and _takes_value(call) for word in _words(call)
    )
    return next((word for word in declared if word in SPELLINGS), None)


def is_among(arguments: Sequence[str]) -> bool:
    """Return whether the option has already been passed."""
    return any(argument.partition("=")[0] in SPELLINGS for argument in arguments)


def _method(call: ast.Call) -> str | None:
    return call.func.attr if isinstance(call.func, ast.Attribute) else None


def _words(call: ast.Call) -> Iterator[str]:
    for argument in call.args:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value


def _takes_value(call: ast.Call) -> bool:
    """Return whether an option takes one value: argparse's default, and its ``store``."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    action = given.get("action")
    return "nargs" not in given and (action is None or (isinstance(action, ast.Constant) and action.value == "store"))
