# SPDX-License-Identifier: Apache-2.0
"""Benchmarks are run by hand: the names they use must still exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(FOLDER.rglob("*.py"))


def test_make_bench_runs_scripts_that_exist() -> None:
    tree = ast.parse((FOLDER / "run.py").read_text(encoding="utf-8"))
    names = next(ast.literal_eval(one.value) for one in tree.body if isinstance(one, ast.Assign))
    assert len(names) > 20
    assert [name for name in names if not (FOLDER / name).is_file()] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_benchmarks_import_names_that_rankwise_has(script: Path) -> None:
    missing: list[str] = []
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "rankwise":
            module = importlib.import_module(node.module)
            names = [f"{node.module}.{one.name}" for one in node.names if not hasattr(module, one.name)]
            missing += [name for name in names if importlib.util.find_spec(name) is None]
    assert missing == []
