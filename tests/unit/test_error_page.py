# SPDX-License-Identifier: Apache-2.0
"""docs/errors.md has a section for every error class and no other, and shows texts that rankwise has."""

from __future__ import annotations

import ast
import re
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "rankwise"
FILES = (
    *SOURCE.glob("errors*.py"),
    SOURCE / "compat/horovod/exceptions.py",
    SOURCE / "compat/horovod/gradients.py",
    SOURCE / "compat/megengine/autodiff.py",
)
"""Where the classes are that a script may catch."""
BASES = {"Exception", "RuntimeError", "ImportError", "UserWarning"}
WITHOUT_EXAMPLE = {"RankwiseError", "HostsUpdatedInterrupt", "HorovodVersionMismatchError"}
"""A base, what scripts never see, and what is never raised."""
SCRIPT = runpy.run_path(str(ROOT / "docs" / "error_examples.py"))
EXAMPLES: list[Any] = SCRIPT["examples"]()
SHORTEST = 15
"""Characters that a text has beside its values to count as found."""


def _error_classes() -> set[str]:
    """Return the exceptions that ``FILES`` define: what derives from one of Python's, or from another of them."""
    found: set[str] = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            bases = {ast.unparse(base) for base in node.bases} if isinstance(node, ast.ClassDef) else set[str]()
            if isinstance(node, ast.ClassDef) and bases & (BASES | found):
                found.add(node.name)
    return found


@cache
def _texts() -> list[re.Pattern[str]]:
    """Return a pattern for each text of the package, long ones first; values may be anything."""
    texts: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                fixed = [str(part.value) if isinstance(part, ast.Constant) else None for part in parts]
                if sum(len(part) for part in fixed if part is not None) >= SHORTEST:
                    texts.add("".join(".+?" if part is None else re.escape(part) for part in fixed))
    return [re.compile(text, re.DOTALL) for text in texts]


def _is_worded_so(line: str) -> bool:
    return any(text.fullmatch(line) for text in _texts())


def test_every_error_class_has_a_section_and_no_other() -> None:
    page = SCRIPT["PAGE"].read_text(encoding="utf-8")
    sections = re.findall(r"^### `(\w+)`$", page, re.MULTILINE)
    assert sorted(sections) == sorted(_error_classes())
    assert {example.error for example in EXAMPLES} == set(sections) - WITHOUT_EXAMPLE


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.error)
def test_an_example_is_worded_as_in_the_code(example: Any) -> None:
    what = re.match(rf"[\w.]+\.{example.error}: (.+)\n", example.shown)
    assert what is not None, "run python docs/error_examples.py"
    assert _is_worded_so(what[1]), "run python docs/error_examples.py"
