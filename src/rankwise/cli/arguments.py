# SPDX-License-Identifier: Apache-2.0
"""A command of ``rankwise`` and its options: built from fields of dataclasses, as values, and their names elsewhere."""

from __future__ import annotations

import argparse
import difflib
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command: what ``--help`` shows of it, its options, and what runs it."""

    name: str
    help: str
    description: str
    epilog: str
    usage: str | None = None
    """``None``: as argparse writes it."""
    add_options: Callable[[argparse.ArgumentParser], None]
    execute: Callable[[argparse.Namespace], int]
    """Returns the exit code."""


_OURS = {
    "nproc-per-node": "use -n, the number of ranks on this machine",
    "nproc": "use -n, the number of ranks on this machine",
    "nprocs": "use -n, the number of ranks on this machine",
    "num-processes": "use -n, the number of ranks on this machine",
    "nnodes": "use --nodes, the number of machines",
    "num-machines": "use --nodes, the number of machines",
    "rdzv-endpoint": "use --rendezvous HOST:PORT, where the machines meet",
    "master-addr": "use --rendezvous HOST:PORT, where the machines meet",
    "master-port": "use --rendezvous HOST:PORT, where the machines meet",
    "main-process-ip": "use --rendezvous HOST:PORT, where the machines meet",
    "machine-rank": "use --node-rank, the number of this machine",
    "rdzv-backend": "leave it out; --rendezvous is all that the machines need",
    "rdzv-id": "leave it out; --rendezvous is all that the machines need",
    "standalone": "leave it out; ranks on one machine need no option for this",
}
"""Options of torchrun, accelerate and others, and their equivalents here."""


COUNTS = ("-n", "-np", "--nproc", "--nproc-per-node", "--nproc_per_node", "--num-processes", "--num_processes")
"""Options of launchers for the number of ranks."""


def equivalents(unknown: Sequence[str]) -> list[str]:
    """Return the equivalent of each option of another launcher among ``unknown``, one line each."""
    names = [word.partition("=")[0].lstrip("-").replace("_", "-") for word in unknown if word.startswith("-")]
    return list(dict.fromkeys(_OURS[name] for name in names if name in _OURS))


def similar(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'run'?`` for the known word that is most like ``word``, or an empty text."""
    nearest = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def options_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the options of a command that its help shows, each with its help."""
    found: dict[str, str] = {}
    # The only public list. Python 3.14 colors it on a terminal.
    shown = re.sub(r"\x1b\[[\d;]*m", "", parser.format_help())
    for entry in re.findall(r"^  (-.*(?:\n {10,}.*)*)", shown, re.MULTILINE):
        names, *text = re.split(r"\s{2,}", entry, maxsplit=1)
        found |= dict.fromkeys(re.findall(r"(?:^|, )(--?[A-Za-z][\w-]*)", names), " ".join("".join(text).split()))
    return found


class TakeCommand(argparse.Action):
    """Takes a script or module and everything after it, unchanged: a later ``--`` belongs to the script."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,  # noqa: ARG002 - it has none
    ) -> None:
        """Set ``target`` and ``arguments``, and ``is_ended``: whether ``--`` stands before them."""
        words = [str(word) for word in values or ()]
        # The first one only ends rankwise's own options.
        namespace.is_ended = words[:1] == ["--"]
        words = words[namespace.is_ended :]
        if not words:
            parser.error("a script or a module is missing")
        namespace.target, namespace.arguments = words[0], words[1:]


def add_command(parser: argparse.ArgumentParser) -> None:
    """Add the script or module that every rank runs, with its arguments, to a command's options."""
    parser.add_argument("-m", dest="module", action="store_true", help="run a module")
    what = "what every rank runs, and its arguments"
    parser.add_argument("command", nargs=argparse.PARSER, metavar="script.py | module", action=TakeCommand, help=what)


def add_option(
    add_argument: Callable[..., object], kind: type[DataclassInstance], name: str, text: str, **own: Any
) -> None:
    """Add the option that sets a field of a dataclass: its type, its choices and its default are those of the field.

    Args:
        add_argument: of the command's parser, or of a group of its options.
        kind: the dataclass.
        name: the field.
        text: the help.
        own: what differs from the field: ``flag``, ``default``, and others as for ``add_argument``.
    """
    flag = own.pop("flag", f"--{name.replace('_', '-')}")
    annotation = get_type_hints(kind)[name]
    if annotation is bool:
        add_argument(flag, dest=name, action="store_true", help=text)
        return
    words: dict[str, Any] = {"default": next(one.default for one in fields(kind) if one.name == name)}
    if get_origin(annotation) is Literal:
        words["choices"] = get_args(annotation)
    else:
        words["type"] = next((one for one in (int, float) if one in {annotation, *get_args(annotation)}), str)
    add_argument(flag, dest=name, help=text, **words | own)


def values_of(kind: type[T], options: argparse.Namespace, /, **own: object) -> T:
    """Return a dataclass with the options that have the names of its fields; ``own`` takes precedence."""
    given = vars(options) | own
    return kind(**{one.name: given[one.name] for one in fields(kind) if one.name in given})


def refuse_misplaced_count(options: argparse.Namespace, command: str, option: str, given: object) -> None:
    """Raise if a script is given a number of ranks that was meant for rankwise, which would start its default number.

    Args:
        options: with the script and its arguments.
        command: that was typed, ``"rankwise run"``.
        option: of that command for the number of ranks.
        given: its value; ``None``: the command has none.
    """
    name, equals, value = (options.arguments or [""])[0].partition("=")
    value = value if equals else "".join(options.arguments[1:2])
    if given is not None or options.is_ended or name not in COUNTS or not value.replace(",", "").isdecimal():
        return
    script = Path(options.target)
    if script.is_file() and re.search(rf"""['"]{name}['"]""", script.read_text(encoding="utf-8", errors="replace")):
        return  # an option of its own
    target = f"{'-m ' if options.module else ''}{options.target}"
    raise ConfigurationError(
        f"{name} {value} stands after the script, and would be passed to it: the job would not have {value} ranks.",
        do=f"{command} {option} {value} {target}\n"
        f"or, if the script has an option of this name: {command} -- {target} {' '.join(options.arguments)}",
    )


def misplaced_options(options: argparse.Namespace) -> str:
    """Return a hint on options of rankwise after the script, which has none of these names; else an empty text."""
    given = [word.partition("=")[0] for word in options.arguments if word.startswith("--") and word != "--help"]
    if not given or options.is_ended:
        return ""
    try:
        text = Path(options.target).read_text(encoding="utf-8", errors="replace").replace("-", "_")
    except OSError:
        return ""
    known = options_of(options.parser)
    found = [name for name in given if name in known and name[2:].replace("-", "_") not in text]
    is_parsed_elsewhere = "add_argument(" not in text and re.search(r"pars|argv|hydra|cli|fire|typer", text)
    if not found or is_parsed_elsewhere:
        return ""
    belong = "belongs" if len(found) == 1 else "belong"
    return f"{', '.join(found)} {belong} before the script, if meant for rankwise: here the script receives it\n"
