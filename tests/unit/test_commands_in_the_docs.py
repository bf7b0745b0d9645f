# SPDX-License-Identifier: Apache-2.0
"""The commands that the pages tell people to type are commands that rankwise takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rankwise.cli import _parser

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
READMES = ("README.md", "README.zh.md")
PAGES = (*READMES, *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")))
OURS = re.compile(r"(?:(?:srun|mpirun) (?:.* )?)?rankwise (.*)")
PROGRAM = re.compile(r"(?:rankwise|srun|mpirun|torchrun|python) .*")
LEFT_OUT = {"…", "..."}
"""What stands for the rest of a command."""


def in_blocks(page: str) -> Iterator[str]:
    """Return the lines of a page's blocks of code; of a block with prompts, those that are typed."""
    for block in re.findall(r"^```.*\n((?:.*\n)*?)```$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE):
        lines = block.splitlines()
        typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        yield from typed or lines


def in_tables(page: str) -> Iterator[str]:
    """Return the code in the first column of a page's tables of commands."""
    is_table = False
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        cell = line.split("|")[1].strip() if line.startswith("|") else ""
        is_table = cell in {"command", "命令"} or (is_table and line.startswith("|"))
        if is_table:
            yield from re.findall(r"`([^`]+)`", cell)


def ours(page: str) -> list[str]:
    """Return what follows ``rankwise`` in each command of a page."""
    found = [OURS.fullmatch(line) for line in (*in_blocks(page), *in_tables(page))]
    # Drawings have remarks beside their lines.
    return [re.split(" {3,}", match[1])[0] for match in found if match is not None]


@pytest.mark.parametrize(("page", "command"), [(page, command) for page in PAGES for command in ours(page)])
def test_a_command_that_is_shown_is_one(page: str, command: str) -> None:
    words = ["train.py" if word in LEFT_OUT else word for word in shlex.split(command, comments=True)]
    try:
        _parser().parse_args(words)
    except SystemExit:
        pytest.fail(f"{page}: rankwise {command}", pytrace=False)


@pytest.mark.parametrize("page", READMES)
def test_every_command_is_in_the_readme(page: str) -> None:
    assert {command.split()[0] for command in ours(page)} == {
        *("run", "verify", "report", "show", "top", "doctor", "env", "stacks", "submit")
    }


def test_both_readmes_have_the_same_commands_in_their_tables() -> None:
    first, second = ([code for code in in_tables(page) if PROGRAM.fullmatch(code)] for page in READMES)
    assert first == second
