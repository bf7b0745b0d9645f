# SPDX-License-Identifier: Apache-2.0
"""The directive ``command-line``: every command of a parser of ``argparse`` and its options, as the parser has them."""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING, Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directive."""
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class CommandLine(SphinxDirective):
    """Takes ``module:function``, which returns the parser."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return a section for each command."""
        module, _, function = self.arguments[0].partition(":")
        parser: argparse.ArgumentParser = getattr(importlib.import_module(module), function)()
        sections: list[nodes.Node] = []
        for name, command in commands_of(parser):
            section = nodes.section(ids=[nodes.make_id(f"{parser.prog} {name}")])
            title = f"{parser.prog} {name}"
            section += nodes.title(title, "", nodes.literal(title, title))
            lines = StringList(list(described(title, command)), source=f"{module}:{function}")
            self.state.nested_parse(lines, self.content_offset, section)
            sections.append(section)
        return sections


def commands_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the name and the parser of each command."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list of them
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - nor a public name for this kind
            yield from action.choices.items()


def described(title: str, command: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the Markdown of one command: what it does, its usage, its options by group, its epilog."""
    yield from (f":::{{program}} {title}", ":::", "", *(command.description or "").splitlines())
    yield from ("", "```text", *usage_of(command), "```", "")
    for group in command._action_groups:  # noqa: SLF001 - as above
        actions = [one for one in group._group_actions if one.help != argparse.SUPPRESS]  # noqa: SLF001 - as above
        if not actions:
            continue
        yield from (f"**{group.title}**", "")
        for action in actions:
            yield from (f":::{{option}} {', '.join(spelled(action))}", helped(action), ":::", "")
    if command.epilog:
        yield from ("```text", *command.epilog.splitlines(), "```", "")


def usage_of(command: argparse.ArgumentParser) -> list[str]:
    """Return the lines of a command's usage, those after the first as they are where they begin with its name."""
    lines = command.format_usage().removeprefix("usage: ").splitlines()
    return [line.strip() if line.strip().startswith("rankwise") else line for line in lines]


def spelled(action: argparse.Action) -> list[str]:
    """Return how an option is written, with its value: ``--nodes N``; of a positional argument its name."""
    if not action.option_strings:
        return [str(action.metavar or action.dest)]
    value = "" if action.nargs == 0 else f" {value_of(action)}"
    return [f"{option}{value}" for option in action.option_strings]


def value_of(action: argparse.Action) -> str:
    """Return what stands for an option's value."""
    if isinstance(action.metavar, tuple):
        return " ".join(action.metavar)
    if action.metavar is None and action.choices is not None:
        return "|".join(str(choice) for choice in action.choices)
    return action.metavar or action.dest.upper()


def helped(action: argparse.Action) -> str:
    """Return what the parser's own help says of an option."""
    return (action.help or "") % {**vars(action), "prog": "rankwise"}
