# SPDX-License-Identifier: Apache-2.0
"""docs/patterns.md: every row has a test, named in tests_of_patterns.json, and messages that rankwise has."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from named_tests import is_a_test

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "patterns.md"
TESTS: dict[str, str] = json.loads(Path(__file__).with_name("tests_of_patterns.json").read_text(encoding="utf-8"))
"""Of each pattern, the test that runs it."""
FEWEST_ROWS = 45
SAID = ("error", "warning", "information", "torch's error")


class Row(NamedTuple):
    pattern: str
    alone: str
    on_ranks: str


def _rows() -> list[Row]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    assert all(len(row) == len(Row._fields) for row in cells), "a row has three cells"
    return [Row(*row) for row in cells if row[0] != "in the script"]


ROWS = _rows()


def _words(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_words(part) for part in node.values)
    return "{}"


@cache
def _messages() -> str:
    """Return all texts of the package; ``{}`` is what is put into them."""
    found: list[str] = []
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [_words(node) for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr)]
    return "\n".join(found)


def test_the_page_has_its_rows() -> None:
    assert len(ROWS) >= FEWEST_ROWS
    assert [row.pattern for row in ROWS] == list(TESTS), "tests_of_patterns.json names a test for each row, in order"


@pytest.mark.parametrize("row", ROWS, ids=[row.pattern for row in ROWS])
def test_a_row_has_a_test_and_words_that_there_are(row: Row) -> None:
    assert is_a_test(TESTS[row.pattern])
    messages = re.findall(r"`([^`]+)`", row.on_ranks)
    assert bool(messages) == any(word in row.on_ranks for word in SAID)
    assert [words for words in messages if words not in _messages()] == []
