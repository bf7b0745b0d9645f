# SPDX-License-Identifier: Apache-2.0
"""Each lesson of docs/course: its commands run, and print what the page shows below them.

A block of commands (``bash``) that a block of output follows is run, in a folder of the page's own. Every line of the
output must be printed, and every line that the commands print on stdout must be on the page, which may leave lines out
with ``...``. Times are not compared, and differences by rounding only must be small; other numbers agree to two units
of their last digit.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

ROOT = Path(__file__).parents[2]
COURSE = ROOT / "docs" / "course"
LESSONS = sorted(COURSE.glob("[1-9]-*.md"))
MOST_LINES = 150
NUM_EXERCISES = 3
LIMIT_SECONDS = 100
ROUNDING = 1e-9
SHOWN = re.compile(
    r"^```bash\n(?P<commands>(?:(?!```).*\n)+)```\n\n```\n(?P<output>(?:(?!```).*\n)+)```$", re.MULTILINE
)
EXIT = re.compile(r" +# exit code (\d+)$")
TIMED = re.compile(r"\d[\d,.]* ?(?:s|ms|µs|MB/s|GB/s|%|samples/s|steps/s|times)(?![\w/])")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


class Example(NamedTuple):
    """Commands of a page, and what it shows below them."""

    commands: list[str]
    output: list[str]


def examples_of(page: Path) -> list[Example]:
    return [
        Example(found["commands"].splitlines(), found["output"].splitlines())
        for found in SHOWN.finditer(page.read_text(encoding="utf-8"))
    ]


def run(command: Command, line: str) -> tuple[list[str], list[str]]:
    """Run one line of a page; return the lines on stdout, and those on stderr."""
    expected = EXIT.search(line)
    program, *words = EXIT.sub("", line).replace("examples/", f"{ROOT}/examples/").split()
    start = {"python": command.python, "rankwise": command.rankwise}[program]
    done = start(*words, env={"OMP_NUM_THREADS": "1"}, seconds=LIMIT_SECONDS)
    assert done.returncode == (int(expected[1]) if expected else 0), done.stderr
    return [[one.rstrip() for one in text.splitlines() if one.strip()] for text in (done.stdout, done.stderr)]


def is_shown_as(printed: str, shown: str) -> bool:
    """Return whether a line is what the page shows, times aside."""
    printed, shown = (" ".join(TIMED.sub("TIME", text).split()) for text in (printed, shown))
    if NUMBER.sub("#", printed) != NUMBER.sub("#", shown):
        return False
    return all(map(_agree, NUMBER.findall(printed), NUMBER.findall(shown)))


def _agree(printed: str, shown: str) -> bool:
    if "e" in shown or "e" in printed:
        return max(float(printed), float(shown)) < ROUNDING
    digits = len(shown.partition(".")[2])
    return float(printed) == pytest.approx(float(shown), rel=ROUNDING, abs=2.1 * 10**-digits if digits else 0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_s_commands_print_what_it_shows(command: Command, page: Path) -> None:
    examples = examples_of(page)
    assert examples, "a lesson shows a command and its output"
    for example in examples:
        out: list[str] = []
        errors: list[str] = []
        for line in example.commands:
            more_out, more_errors = run(command, line)
            out += more_out
            errors += more_errors
        lines = [line for line in example.output if line.strip() not in {"", "..."}]
        missing = [line for line in lines if not any(is_shown_as(printed, line) for printed in out + errors)]
        assert missing == [], "\n".join(out + errors)
        if "..." not in example.output:
            assert [line for line in out if not any(is_shown_as(line, shown) for shown in lines)] == []
    for picture in command.folder.glob("*.svg"):
        assert picture.read_text(encoding="utf-8").rstrip().endswith("</svg>")
    shutil.rmtree(command.folder / "runs", ignore_errors=True)


@pytest.mark.parametrize("page", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_has_its_parts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) < MOST_LINES
    assert "**You learn**" in text
    assert "**You need**" in text
    exercises, answers = text.partition("## Exercises")[2].split("<summary>Answers</summary>")
    for part in (exercises, answers):
        assert len(re.findall(r"^\d\. ", part, re.MULTILINE)) == NUM_EXERCISES


def test_the_index_lists_all_lessons() -> None:
    index = (COURSE / "index.md").read_text(encoding="utf-8")
    menu = index.partition("```{toctree}")[2]
    assert re.findall(r"^(\d-.+)$", menu, re.MULTILINE) == [page.stem for page in LESSONS]
    assert [page.name for page in LESSONS if f"({page.name})" not in index] == []


def test_lines_with_other_numbers_are_told_apart() -> None:
    assert is_shown_as("epoch 1: loss 0.4001 in 0.8 s", "epoch 1: loss 0.4000 in 1.2 s")
    assert is_shown_as("largest difference 2.2e-16", "largest difference 0.0e+00")
    assert not is_shown_as("epoch 1: loss 0.4100", "epoch 1: loss 0.4000")
    assert not is_shown_as("epoch 2: loss 0.4000", "epoch 1: loss 0.4000")
    assert not is_shown_as("largest difference 2.2e-06", "largest difference 0.0e+00")
