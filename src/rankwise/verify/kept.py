# SPDX-License-Identifier: Apache-2.0
"""Values that a script keeps from one step to the next and computes its loss from: queues, centers, moving averages.

Which names they have is read from the text of the script. Imported by ``recorder``.
"""

from __future__ import annotations

import ast
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from rankwise.verify import sketches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import FrameType

    from rankwise.verify.records import Sketch

MOST_ITEMS = 4096
"""Of a list or a dictionary: longer ones are data."""
_GIVEN_LOSSES = {"backward", "manual_backward", "minimize", "grad", "value_and_grad"}
_RETURN_LOSSES = {"forward", "__call__", "training_step"}


# -- names ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kept:
    """A name whose value goes from step to step into a loss."""

    name: str
    """``"queue"``, or ``".queue"`` of an attribute of any object."""
    line: str
    """The line that changes it, ``train.py:31``."""
    lines: range
    """Of the loop that carries it; empty for an attribute, and for a global variable that a function changes."""


def names_kept(text: str, file: str) -> list[Kept]:
    """Return the names of a script that a loop or a function reads and then changes, and that a loss follows from.

    A loss is what ``backward()`` is called on, or what a function like ``forward`` returns.
    """
    names = _Names(file)
    names.events(ast.parse(text))
    found, pending = set(names.sinks), list(names.sinks)
    while pending:
        sources = names.sources.get(pending.pop(), set()) - found
        found |= sources
        pending += sources
    return [one for one in names.carried if one.name in found]


class _Names:
    """What each name is computed from, and which ones are read before they are changed."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.sources: dict[str, set[str]] = {}
        self.sinks: set[str] = set()
        self.carried: list[Kept] = []

    def events(self, node: ast.AST, function: str = "") -> list[tuple[str, int]]:
        """Return the names that code reads, with 0, and changes, with the line; functions are looked at apart."""
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node)
                return []
            case ast.For() | ast.AsyncFor() | ast.While():
                return self._loop(node, function)
            case ast.If():
                branches = [self._all(node.body, function), self._all(node.orelse, function)]
                return [*self._reads(node.test), *_of_branches(branches)]
            case ast.Assign() | ast.Delete():
                return self._assigned(node.targets, getattr(node, "value", None), node.lineno)
            case ast.AnnAssign() | ast.AugAssign():
                held = self._reads(node.target) if isinstance(node, ast.AugAssign) else []
                return [*held, *self._assigned([node.target], node.value, node.lineno)]
            case ast.Expr(value=ast.Call(func=ast.Attribute()) as call):
                return self._assigned([_owner(call)], call, node.lineno)
            case ast.Return(value=ast.expr() as value):
                for name in (function, f".{function}()"):
                    self.sources.setdefault(name, set()).update(_names(value))
                self.sinks |= _names(value) if function in _RETURN_LOSSES else set()
                return self._reads(value)
            case ast.expr() | ast.Expr() | ast.withitem():
                return self._reads(node)
            case _:
                return self._all(ast.iter_child_nodes(node), function)

    def _loop(self, loop: ast.For | ast.AsyncFor | ast.While, function: str) -> list[tuple[str, int]]:
        # An iterator is made once, before the loop.
        is_test = isinstance(loop, ast.While)
        head = self._reads(loop.test) if is_test else self._assigned([loop.target], loop.iter, loop.lineno)
        inner = head + self._all(loop.body, function)
        carried = inner if is_test else inner[len(_names(loop.iter)) :]
        self._carry(carried, range(loop.lineno, (loop.end_lineno or loop.lineno) + 1))
        return [*inner, *self._all(loop.orelse, function)]

    def _all(self, nodes: Iterable[ast.AST], function: str) -> list[tuple[str, int]]:
        return [event for node in nodes for event in self.events(node, function)]

    def _function(self, one: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        given = [(node.arg, one.lineno) for node in ast.walk(one.args) if isinstance(node, ast.arg)]
        outside = {name for node in ast.walk(one) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
        events = given + self._all(one.body, one.name)
        if one.name != "__init__":
            self._carry([event for event in events if event[0].startswith(".") or event[0] in outside], range(0))

    def _assigned(self, targets: Sequence[ast.AST | None], value: ast.AST | None, line: int) -> list[tuple[str, int]]:
        """Return the events of an assignment, and note what its targets follow from."""
        names = set() if value is None else _names(value)
        found = [] if value is None else self._reads(value)
        for target in targets:
            for leaf in () if target is None else _leaves(target):
                # Other elements stay: to change some of them is to read them.
                found += self._reads(leaf) if isinstance(leaf, ast.Subscript) else []
                name = _name(leaf)
                if name:
                    self.sources.setdefault(name, set()).update(names | (_names(leaf) - {name}))
                    found.append((name, line))
        return found

    def _reads(self, node: ast.AST) -> list[tuple[str, int]]:
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and _name(call.func).lstrip(".") in _GIVEN_LOSSES:
                self.sinks |= _names(call)
        return [(name, 0) for name in sorted(_names(node))]

    def _carry(self, events: Sequence[tuple[str, int]], lines: range) -> None:
        changed = {name: line for name, line in reversed(events) if line}
        self.carried += [
            Kept(name, f"{self._file}:{changed[name]}", range(0) if name.startswith(".") else lines)
            for name, line in _firsts(events).items()
            if not line and name in changed
        ]


def _of_branches(branches: Iterable[Sequence[tuple[str, int]]]) -> list[tuple[str, int]]:
    """Return what branches read before they change it, and then what any of them changes."""
    first = [(name, 0) for branch in branches for name, line in _firsts(branch).items() if not line]
    return first + [event for branch in branches for event in branch if event[1]]


def _firsts(events: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, line in events:
        found.setdefault(name, line)
    return found


def _names(node: ast.AST) -> set[str]:
    """Return the names in an expression: variables, attributes with a dot, methods that are called with parentheses."""
    nodes = list(ast.walk(node))
    methods = {id(one.func) for one in nodes if isinstance(one, ast.Call)}
    targets = [one.target for one in nodes if isinstance(one, ast.comprehension)]
    bound = {leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
    bound |= {one.arg for one in nodes if isinstance(one, ast.arg)}
    variables = {one.id for one in nodes if isinstance(one, ast.Name)} - bound
    return variables | {f".{one.attr}{'()' * (id(one) in methods)}" for one in nodes if isinstance(one, ast.Attribute)}


def _owner(call: ast.expr) -> ast.expr:
    """Return what a call changes whose result is not used, as queue.extend(keys) changes queue."""
    while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        call = call.func.value
    return call


def _leaves(target: ast.AST) -> Iterator[ast.AST]:
    if isinstance(target, ast.Tuple | ast.List):
        for one in target.elts:
            yield from _leaves(one)
    else:
        yield target.value if isinstance(target, ast.Starred) else target


def _name(node: ast.AST) -> str:
    """Return the name that an assignment changes: of ``a[i]`` and ``a``, ``a``; of ``b.a``, ``.a``."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else f".{node.attr}" if isinstance(node, ast.Attribute) else ""


# -- values --------------------------------------------------------------------------------------------------


class KeptValues:
    """The values that a script keeps, whose files begin with ``root``."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._names: dict[str, list[Kept]] = {}
        """By file."""

    def now(self, frames: Iterable[FrameType]) -> dict[str, tuple[Sketch, str]]:
        """Return the values in the variables of functions that run, and the line that changes each."""
        found: dict[str, tuple[Sketch, str]] = {}
        for frame in frames:
            own = self._of_file(frame.f_code.co_filename)
            if not found:
                for module in list(sys.modules.values()):
                    self._of_file(getattr(module, "__file__", None) or "")
            others = [one for names in self._names.values() if names is not own for one in names]
            attributes = [one for one in others if one.name.startswith(".")]
            values = values_kept([*own, *attributes], frame.f_locals, frame.f_lineno, self._is_own)
            found = values | found
        return found

    def _of_file(self, path: str) -> list[Kept]:
        if path.startswith(self._root) and path.endswith(".py") and path not in self._names:
            name = path.removeprefix(self._root)
            try:
                self._names[path] = names_kept(Path(path).read_text(encoding="utf-8"), name)
            except (OSError, SyntaxError, UnicodeDecodeError):
                self._names[path] = []
        return self._names.get(path, [])

    def _is_own(self, value: object) -> bool:
        file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
        return isinstance(file, str) and file.startswith(self._root)


def values_kept(
    names: Iterable[Kept], variables: Mapping[str, object], line: int, is_own: Callable[[object], bool]
) -> dict[str, tuple[Sketch, str]]:
    """Return the values of names among variables and in their objects, as the script writes them, with their lines.

    Args:
        names: as :func:`names_kept` returns them.
        variables: of a function or a module of the script.
        line: which of its lines is running.
        is_own: whether an object is of a class of the script.
    """
    plain = {one.name: one.line for one in names if one.name in variables and (line in one.lines or not one.lines)}
    attributes = {one.name[1:]: one.line for one in names if one.name.startswith(".")}
    found = {name: (variables[name], changed) for name, changed in plain.items()}
    for path, held in _objects(variables, is_own) if attributes else ():
        found |= {f"{path}.{key}": (held[key], changed) for key, changed in attributes.items() if key in held}
    sketched = {name: (_sketch(value), changed) for name, (value, changed) in found.items()}
    return {name: (sketch, changed) for name, (sketch, changed) in sketched.items() if sketch is not None}


def _objects(
    variables: Mapping[str, object], is_own: Callable[[object], bool]
) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the attributes of modules and of objects of the script, and of those that these hold."""
    seen: set[int] = set()
    pending = list(variables.items())
    while pending:
        name, value = pending.pop(0)
        if id(value) in seen or not (isinstance(value, nn.Module) or is_own(value)) or isinstance(value, type):
            continue
        seen.add(id(value))
        held: dict[str, object] = dict(getattr(value, "__dict__", {}))
        if isinstance(value, nn.Module):
            held |= dict(value.named_buffers(recurse=False)) | dict(value.named_children())
        yield name, held
        pending += [(f"{name}.{key}", inner) for key, inner in held.items()]


def _sketch(value: Any) -> Sketch | None:
    if isinstance(value, dict):
        value = list(cast("dict[Any, Any]", value).values())
    items = list(value) if isinstance(value, list | tuple | deque) and len(value) <= MOST_ITEMS else [value]
    numbers = [torch.tensor(float(one)) if isinstance(one, int | float) else one for one in items]
    if not numbers or not all(isinstance(one, torch.Tensor) and not one.is_meta for one in numbers):
        return None
    tensors = cast("list[torch.Tensor]", numbers)
    if len(tensors) > 1:
        return sketches.of_tensor(torch.cat([one.detach().double().reshape(-1) for one in tensors]))
    return None if isinstance(tensors[0], nn.Parameter) else sketches.of_tensor(tensors[0])
