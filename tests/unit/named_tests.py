# SPDX-License-Identifier: Apache-2.0
"""The tests that tables of the documentation name."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
NAME = re.compile(r"((?:\w+/)?test_\w+\.py)::(test_\w+)(?:\[(.+)\])?")


def is_a_test(name: str) -> bool:
    """Return whether a test exists, named as pytest names it: ``test_file.py::test_name[parameter]``."""
    found = NAME.fullmatch(name)
    if found is None:
        return False
    file, test, parameter = found.groups()
    functions, texts = _functions_and_texts(file)
    return test in functions and (parameter is None or parameter in texts)


@cache
def _functions_and_texts(file: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the functions of a test file, and its texts and names, with those of the files beside it."""
    (path,) = TESTS.glob(file if "/" in file else f"*/{file}")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    beside = [path.with_name(f"{module}.py") for module in modules]
    trees = [tree, *(ast.parse(one.read_text(encoding="utf-8")) for one in beside if one.exists())]
    nodes = [node for one in trees for node in ast.walk(one)]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return frozenset(functions), frozenset(texts | {node.name for node in nodes if isinstance(node, ast.FunctionDef)})
