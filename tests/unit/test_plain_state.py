# SPDX-License-Identifier: Apache-2.0
"""State is kept by what it belongs to: no collection stands for one value, and no file sets another file's state."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "rankwise"
OF_TORCH_AND_PYTHON = {
    "__cause__",
    "__class__",
    "__doc__",
    "__file__",
    "__init__",
    "__loader__",
    "__name__",
    "__package__",
    "__path__",
    "__spec__",
    "__traceback__",
    "args",
    "argtypes",
    "atexit",
    "data",
    "excepthook",
    "grad",
    "requires_grad",
    "restype",
}
"""Attributes that torch, Python, ctypes and weakref have others set."""
BY_NAME = {
    "block.forward",
    "layer.weight",
    "module.__spec__.loader",
    "module.forward",
    "namespace.arguments",
    "namespace.is_ended",
    "namespace.target",
    "node.id",
    "optimizer.step",
    "owner.bit_generator.state",
    "philox.bits.state",
    "spec.loader",
    "sys.stderr",
    "sys.stdout",
    "torch.autograd.backward",
    "torch.backends.cudnn.benchmark",
    "torch.backends.cudnn.deterministic",
}
"""The same, where the attribute's name is too common to be allowed everywhere."""
OWN = {"self", "cls", "ctx"}
"""``ctx`` is autograd's, for the function itself."""


def kept_by_classes(tree: ast.Module) -> set[str]:
    """Return the attributes of the classes of a file, which the whole file may set."""
    found: set[str] = set()
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(kind):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if ast.unparse(node.value) in {"self", "cls"} else set()
        for node in kind.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found |= {one.id for one in targets if isinstance(one, ast.Name)}
    return found


def set_from_outside(tree: ast.Module) -> list[str]:
    """Return the attributes that a file sets of what other files keep."""
    own = kept_by_classes(tree)
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and ast.unparse(node.value) not in OWN
        and node.attr not in own | OF_TORCH_AND_PYTHON
        and ast.unparse(node) not in BY_NAME
    ]


def cells(tree: ast.Module) -> list[str]:
    """Return where a collection of a module stands for one value: written at a fixed place, or used as a flag."""
    names: set[str] = set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(getattr(node, "value", None), ast.List | ast.Dict):
            names |= {one.id for one in targets if isinstance(one, ast.Name)}
    places = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in names
    ]
    fixed = [place for place in places if isinstance(place.slice, ast.Constant)]
    replaced = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and node.targets[0] in places and isinstance(node.value, ast.List | ast.IfExp)
    ]
    flags = {f"{name}.append({word})" for name in names for word in (True, None)}
    marked = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node) in flags]
    wrong = [*fixed, *(node for node in replaced if node.targets[0] not in fixed), *marked]
    return [f"line {node.lineno}: {ast.unparse(node)}" for node in wrong]


@pytest.mark.parametrize(
    "source",
    [
        "_next = [0]\ndef f():\n    _next[0] += 1",
        "_open: list[int] = []\ndef f(x):\n    _open[:] = [x]",
        "_is_done: list[bool] = []\ndef f():\n    _is_done.append(True)",
        "_speaker = {'prefix': ''}\ndef f():\n    _speaker['prefix'] = 'x'",
    ],
)
def test_a_collection_that_stands_for_one_value_is_seen(source: str) -> None:
    assert len(cells(ast.parse(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "session.batch = None",
        "def f(self):\n    self.detector.error = error",
        "one.count += 1",
        "first, one.rest = pair",
        "del one.rest",
    ],
)
def test_setting_what_another_file_keeps_is_seen(source: str) -> None:
    assert len(set_from_outside(ast.parse(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def f(self):\n        self.x = 1\ndef g(a):\n    a.x = 2",
        "class A:\n    x: int = 0\ndef g(a):\n    a.x = 2",
        "parameter.grad = None",
        "ctx.shape = x.shape",
        "_found = []\ndef f(x):\n    _found.append(x)",
        "_of = {}\ndef f(x):\n    _of[x] = 1",
        "_found = []\ndef f():\n    _found[:] = [x for x in _found if x]",
    ],
)
def test_nothing_else_is_seen(source: str) -> None:
    assert cells(ast.parse(source)) + set_from_outside(ast.parse(source)) == []


def test_state_is_kept_by_what_it_belongs_to() -> None:
    # torch_private is the room for what torch has no methods for.
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    found = {
        str(path.relative_to(SOURCE)): cells(tree)
        + ([] if path.is_relative_to(SOURCE / "torch_private") else set_from_outside(tree))
        for path, tree in trees.items()
    }
    assert {path: places for path, places in found.items() if places} == {}, "use a method, a class or functools.cache"
