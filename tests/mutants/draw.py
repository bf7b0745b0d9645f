# SPDX-License-Identifier: Apache-2.0
"""Draws small mistakes from all of the code by chance: ``draw.py NUMBER SEED > drawn.toml``, a file for ``run.py``.

Whoever writes a mistake by hand may have a test in mind. A drawn one changes a single expression, or leaves out a
single statement, on a line of its own. Some of them change nothing that anybody can observe; look at what is missed.
"""

from __future__ import annotations

import ast
import random
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCE = ROOT / "src" / "rankwise"
COMPARISONS: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
}
CONJUNCTIONS: dict[type[ast.boolop], ast.boolop] = {ast.And: ast.Or(), ast.Or: ast.And()}
ARITHMETIC: dict[type[ast.operator], ast.operator] = {ast.Add: ast.Sub(), ast.Sub: ast.Add(), ast.Mult: ast.Div()}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
FOR_READERS = {"annotation", "returns", "decorator_list"}
"""Parts of functions and assignments that do not run, or that name what does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """An expression or a statement of a file, and what stands in its place."""

    path: Path
    node: ast.expr | ast.stmt
    new: str


def changes(path: Path) -> Iterator[Change]:
    """Yield all that can be changed in a file."""
    for node in _what_runs(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield Change(path=path, node=node.test, new=f"not ({ast.unparse(node.test)})")
        elif isinstance(node, ast.expr | ast.stmt):
            new = _other(node)
            if new is not None:
                yield Change(path=path, node=node, new=new)


def _other(node: ast.expr | ast.stmt) -> str | None:
    """Return what could stand in the place of a node by mistake."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=comparators):
            return ast.unparse(ast.Compare(left, [COMPARISONS[type(operator)]], comparators))
        case ast.BoolOp(op=operator, values=values):
            return f"({ast.unparse(ast.BoolOp(CONJUNCTIONS[type(operator)], values))})"
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in ARITHMETIC:
            return f"({ast.unparse(ast.BinOp(left, ARITHMETIC[type(operator)], right))})"
        case ast.Constant(value=bool(value)):
            return str(not value)
        case ast.Constant(value=int(value)):
            return str(value + 1)
        case ast.Name(id=name) if name in FUNCTIONS:
            return FUNCTIONS[name]
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete():
            return "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return "pass"
        case _:
            return None


def _what_runs(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name, value in ast.iter_fields(node):
        if name in FOR_READERS:
            continue
        for child in value if isinstance(value, list) else [value]:
            is_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            if isinstance(child, ast.AST) and not is_for_types:
                yield from _what_runs(child)


def as_entry(change: Change) -> str | None:
    """Return an entry for ``run.py``, or ``None`` where it would be no Python, or no TOML.

    It replaces whole lines: as many as it takes for them to stand in the file once.
    """
    node = change.node
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    text = change.path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    start, end = node.lineno - 1, node.end_lineno
    before = lines[start].encode()[: node.col_offset].decode()
    after = lines[end - 1].encode()[node.end_col_offset :].decode()
    old, new = "".join(lines[start:end]), before + change.new + after
    while text.count(old) > 1:
        start -= 1
        old, new = lines[start] + old, lines[start] + new
    try:
        compile(text.replace(old, new), str(change.path), "exec")
    except SyntaxError:
        return None
    was = lines[node.lineno - 1].strip()
    what = f"{change.path.relative_to(SOURCE)}:{node.lineno}: {was} -> {change.new.splitlines()[0]}"
    if "'" * 3 in old + new:
        return None
    tests = "".join(f'\n    "{one}",' for one in tests_of(change.path))
    # TOML leaves out a newline behind the quotes.
    return "\n".join(
        [
            "[[mistake]]",
            f"what = '''{what}'''",
            f'path = "{change.path.relative_to(ROOT)}"',
            f"old = '''\n{old}'''",
            f"new = '''\n{new}'''",
            f"tests = [{tests}\n]\n",
        ]
    )


def tests_of(path: Path) -> list[str]:
    """Return the test files of the room that a module is in; of the inner room, where there is one."""
    rooms = tomllib.loads((HERE / "tests_of_rooms.toml").read_text(encoding="utf-8"))["tests"]
    inside = path.relative_to(SOURCE).as_posix()
    room = max((room for room in rooms if inside.startswith(room)), key=len)
    return [str(one.relative_to(ROOT)) for pattern in rooms[room] for one in sorted((ROOT / "tests").glob(pattern))]


def main() -> None:
    """Print the file."""
    number, seed = map(int, sys.argv[1:])
    drawn = [change for path in sorted(SOURCE.rglob("*.py")) for change in changes(path)]
    random.Random(seed).shuffle(drawn)
    entries: dict[tuple[Path, int], str] = {}
    for change in drawn:
        entry = as_entry(change)
        if entry is not None:
            entries.setdefault((change.path, change.node.lineno), entry)
        if len(entries) == number:
            break
    sys.stdout.write("\n".join(entries.values()))


if __name__ == "__main__":
    main()
