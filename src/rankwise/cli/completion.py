# SPDX-License-Identifier: Apache-2.0
"""``rankwise completion``: a script that completes commands, options and file names in bash, zsh or fish.

Made from the parsers, so it names what this version accepts. Writes into no file of the user's.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Literal, get_args

from rankwise.cli.arguments import Command, options_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

Shell = Literal["bash", "zsh", "fish"]

_BASH = """\
_rankwise() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    words="{commands}"
  elif [[ $word == -* && " ${{COMP_WORDS[*]:1:$((COMP_CWORD - 1))}} " != *".py "* ]]; then
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
  fi
  [[ -z $words ]] || COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _rankwise rankwise
"""


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("shell", choices=get_args(Shell), help="the shell that reads the script")


def _run(options: argparse.Namespace) -> int:
    """Print the script."""
    # The package imports this module as one of its commands.
    from rankwise.cli import parsers  # noqa: PLC0415

    found = parsers()
    helps = {name: help_text for name, (help_text, _) in found.items()}
    words = {name: options_of(parser) for name, (_, parser) in found.items()}
    sys.stdout.write(_fish(helps, words) if options.shell == "fish" else _bash(words, is_zsh=options.shell == "zsh"))
    return 0


def _bash(options: Mapping[str, Mapping[str, str]], *, is_zsh: bool) -> str:
    """Return the script for bash; zsh runs the same function."""
    cases = "\n".join(f'      {name}) words="{" ".join(words)}" ;;' for name, words in options.items())
    script = _BASH.format(commands=" ".join(options), cases=cases)
    return f"autoload -Uz compinit bashcompinit && compinit && bashcompinit\n{script}" if is_zsh else script


def _fish(helps: Mapping[str, str], options: Mapping[str, Mapping[str, str]]) -> str:
    """Return the script for fish, which also shows what commands and options are for."""
    lines = [
        f"complete -c rankwise -n __fish_use_subcommand -f -a {name} -d {_quoted(text)}" for name, text in helps.items()
    ]
    for command, words in options.items():
        for word, text in words.items():
            dashes = word[: len(word) - len(word.lstrip("-"))]
            # -n is a letter, -np an old option of several.
            kind = "l" if dashes == "--" else "s" if len(word) == 2 else "o"  # noqa: PLR2004 - a dash and a letter
            lines.append(
                f"complete -c rankwise -n '__fish_seen_subcommand_from {command}' "
                f"-{kind} {word[len(dashes) :]} -d {_quoted(text)}"
            )
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    words = re.split(r"[;(]", text)[0].strip()
    return "'" + words.replace("\\", "\\\\").replace("'", "\\'") + "'"


COMMAND = Command(
    name="completion",
    help="print a script that completes commands and options in bash, zsh or fish",
    description="Print a script that completes the commands and options of rankwise, and file names, with the tab key.",
    epilog="""\
examples:
  echo 'eval "$(rankwise completion bash)"' >> ~/.bashrc
  echo 'eval "$(rankwise completion zsh)"' >> ~/.zshrc
  rankwise completion fish > ~/.config/fish/completions/rankwise.fish""",
    add_options=_add_options,
    execute=_run,
)
