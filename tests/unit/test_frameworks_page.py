# SPDX-License-Identifier: Apache-2.0
"""docs/frameworks.md: every row names a test that exists, and the version that is pinned for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from named_tests import is_a_test

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "frameworks.md"
LOCK = ROOT / "requirements" / "frameworks.lock"
SCRIPTS = ROOT / "tests" / "frameworks" / "scripts"
HEADINGS = {"framework", "launcher"}


class Row(NamedTuple):
    subject: str
    version: str
    what_was_run: str
    result: str
    test: str


def _rows() -> list[Row]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.removeprefix("|").removesuffix("|").split(" |")] for line in lines]
    assert all(len(row) == len(Row._fields) for row in cells), "a row has five cells"
    return [Row(*row) for row in cells if row[0] not in HEADINGS]


ROWS = _rows()


@pytest.mark.parametrize("row", ROWS, ids=[row.subject for row in ROWS])
def test_a_row_names_a_test_and_the_pinned_version(row: Row) -> None:
    assert is_a_test(row.test)
    pins = LOCK.read_text(encoding="utf-8").splitlines()
    named = re.findall(r"`(.+?)`", row.version)
    assert [pin for pin in named if pin not in pins] == []
    by_framework = row.test.startswith("frameworks/") and row.version
    assert named or not by_framework, "a framework's row says its version as the lock does"


def test_each_script_that_trains_has_a_row() -> None:
    named = {found[1] for row in ROWS if (found := re.search(r"\[(\w+)\]$", row.test))}
    scripts = {path.stem for path in SCRIPTS.glob("*.py")}
    assert scripts - named == {"lightning_endless", "logged_values", "tensorflow_collectives"}
