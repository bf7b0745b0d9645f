# SPDX-License-Identifier: Apache-2.0
"""Torch's private names stand in the room ``torch_private`` alone, and its table lists those that it uses."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from rankwise.torch_private.names import NAMES

SOURCE = Path(__file__).parents[2] / "src" / "rankwise"
ROOM = SOURCE / "torch_private"
OF_PYTHON = {
    "_args_from_interpreter_flags",
    "_asdict",
    "_config",
    "_current_frames",
    "_exit",
    "_fields",
    "_getframe",
    "_replace",
    "_run_exitfuncs",
}
OF_TRANSFORMERS = {"_init_weights", "_no_split_modules"}
ALSO_PUBLIC = {"reduce_dtype"}
"""Of torch.distributed.fsdp.MixedPrecisionPolicy."""
IN_TEXT = re.compile(r"\btorch(\.\w+)*\._[A-Za-z]\w*")
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller", "getattr_static"}


def is_private(word: str) -> bool:
    return word.startswith("_") and not word.startswith("__") and word != "_"


def is_private_of_torch(dotted: str) -> bool:
    words = dotted.split(".")
    return words[0] == "torch" and any(map(is_private, words))


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(), str(path)) for path in sorted(SOURCE.rglob("*.py"))}


def outside() -> list[Path]:
    return [path for path in trees() if not path.is_relative_to(ROOM)]


def within() -> list[Path]:
    return [path for path in trees() if path.is_relative_to(ROOM) and path.name != "names.py"]


def offered() -> set[str]:
    """Return the names that the files of the room offer to other rooms."""
    found: set[str] = set()
    for path in within():
        for node in trees()[path].body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.ImportFrom):
                found |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                found |= {target.id for target in ast.walk(node) if is_stored(target)}
    return found


def is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


@cache
def forbidden() -> frozenset[str]:
    """Return the words that nothing outside of the room may read from an object or name in a string."""
    last = {name.rpartition(".")[2] for name in NAMES}
    private = {word for name in NAMES for word in name.split(".") if is_private(word)}
    return frozenset(private | (last - {word for word in offered() if not is_private(word)} - ALSO_PUBLIC))


def defined(tree: ast.Module) -> set[str]:
    """Return the private names that a module gives to things of its own."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif is_stored(node):
            found.add(node.id)  # type: ignore[attr-defined]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            found.add(node.attr)
    return {word for word in found | slots(tree) if is_private(word)}


def slots(tree: ast.AST) -> set[str]:
    return {
        constant.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__"
        for constant in ast.walk(node.value)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    }


@cache
def defined_in_the_package() -> frozenset[str]:
    return frozenset().union(*(defined(trees()[path]) for path in outside()))


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}


def imported_from_torch(tree: ast.Module) -> set[str]:
    """Return the names under which a module knows torch, what it imports of it, and what the room offers."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname or "torch" for alias in node.names if alias.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(("torch.", "rankwise.torch_private.")):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


@cache
def classes_of_torch() -> frozenset[str]:
    """Return the names of the package's classes that are made from torch's, at any number of removes."""
    found: set[str] = set()
    while True:
        more = {node.name for path in outside() for node in made_from_torch(trees()[path], found)}
        if more <= found:
            return frozenset(found)
        found |= more


def made_from_torch(tree: ast.Module, known: set[str] | frozenset[str]) -> list[ast.ClassDef]:
    roots = imported_from_torch(tree) | known
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(re.split(r"[.\[]", ast.unparse(base))[0] in roots for base in node.bases)
    ]


def docstrings(tree: ast.AST) -> set[int]:
    """Return the ids of the strings that stand alone: docstrings, also those below an attribute."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def private_uses(tree: ast.Module, own: frozenset[str], known: frozenset[str] = frozenset()) -> list[str]:
    """Return the places where a module uses a private part of torch.

    Args:
        tree: of the module.
        own: the private names that the package gives to things of its own.
        known: classes of the package that are made from torch's.
    """
    allowed = (own - forbidden()) | OF_PYTHON | OF_TRANSFORMERS
    found: list[tuple[int, str]] = []
    of_torch = {id(inner) for one in made_from_torch(tree, known) for inner in ast.walk(one)}
    told = docstrings(tree)
    of_slots = slots(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            words = [f"{module}{alias.name}" for alias in node.names if is_private_of_torch(f"{module}{alias.name}")]
        elif isinstance(node, ast.Attribute):
            words = [node.attr] if is_wrong(node, allowed, is_in_torch_class=id(node) in of_torch) else []
        elif isinstance(node, ast.FunctionDef):
            words = [node.name] if id(node) in of_torch and node.name in forbidden() else []
        elif isinstance(node, ast.keyword):
            words = [node.arg] if node.arg is not None and is_private(node.arg) and node.arg not in allowed else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_NAME:
            given = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            words = [part for one in given for part in one.split(".") if is_private(part) and part not in allowed]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            is_named = node.value in forbidden() and node.value not in of_slots
            words = [node.value] if is_named or IN_TEXT.search(node.value) else []
        else:
            continue
        found += [(node.lineno, f"line {node.lineno}: {word}") for word in words]
    return [said for _, said in sorted(set(found))]


def is_wrong(node: ast.Attribute, allowed: set[str] | frozenset[str], *, is_in_torch_class: bool) -> bool:
    if is_own(node) and not is_in_torch_class:
        return False
    return node.attr in forbidden() or (is_private(node.attr) and node.attr not in allowed)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch.utils._pytree as pytree", "torch.utils._pytree"),
        ("from torch.utils import _pytree", "torch.utils._pytree"),
        ("def f():\n    from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("from torch.nn.modules.batchnorm import _BatchNorm", "torch.nn.modules.batchnorm._BatchNorm"),
        ("torch._foreach_add_(a, b)", "_foreach_add_"),
        ("torch._C.something()", "_C"),
        ("version = tensor._version", "_version"),
        ("module._buffers = {}", "_buffers"),
        ("del module._parameters", "_parameters"),
        ("x._never_heard_of", "_never_heard_of"),
        ("one._unsharded_param.grad = None", "_unsharded_param"),
        ("one.unsharded_accumulated_grad = None", "unsharded_accumulated_grad"),
        ("group.post_backward()", "post_backward"),
        ("getattr(one, '_unsharded_param', None)", "_unsharded_param"),
        ("hasattr(step, '_wrapped_by_lr_sched')", "_wrapped_by_lr_sched"),
        ("setattr(module, '_unknown', 1)", "_unknown"),
        ("operator.attrgetter('a._saved_self')", "_saved_self"),
        ("vars(group)['fsdp_params']", "fsdp_params"),
        ("print('call torch._disable_dynamo()')", "call torch._disable_dynamo()"),
        ("print(f'{x} torch.utils._pytree')", "torch.utils._pytree"),
        ("TypedStorage(_internal=True)", "_internal"),
        ("from torch import nn\nclass A(nn.Module):\n    def f(self):\n        self._buffers", "_buffers"),
        ("import torch\nclass A(torch.Tensor):\n    def f(self):\n        self._grad_fn", "_grad_fn"),
        ("from torch import nn\nclass A(nn.Module):\n    def _call_impl(self): ...", "_call_impl"),
        ("class A(OfThePackage):\n    def f(self):\n        self._modules", "_modules"),
    ],
)
def test_a_private_name_is_seen(source: str, word: str) -> None:
    known = frozenset({"OfThePackage"})
    assert any(said.endswith(word) for said in private_uses(ast.parse(source), frozenset(), known))


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed.tensor",
        "from rankwise.torch_private.autograd import version_of",
        "from rankwise.torch_private import tensors\ntensors.tree_flatten(x)",
        "class A:\n    def f(self):\n        self._modules = self._buffers",
        "class A:\n    __slots__ = ('_modules',)",
        "one._own",
        "from torch import nn\nclass A(nn.Module):\n    def f(self):\n        self._own",
        "sys._getframe(1)",
        "pair._replace(a=1)",
        "module.__dict__",
        "def f():\n    'Source: torch._C._autograd.'",
        "hasattr(x, '_fields')",
        "f(_own=1)",
        "'_not_a_name_of_torch'",
    ],
)
def test_nothing_else_is_seen(source: str) -> None:
    assert private_uses(ast.parse(source), frozenset({"_own", "_modules"})) == []


def test_private_names_of_torch_stand_in_one_room() -> None:
    found = {
        str(path.relative_to(SOURCE)): private_uses(trees()[path], defined_in_the_package(), classes_of_torch())
        for path in outside()
    }
    assert {path: uses for path, uses in found.items() if uses} == {}, "move these into rankwise.torch_private"


# -- the table -----------------------------------------------------------------------------------------


def used(path: Path) -> set[str]:
    """Return the private names that a file of the room uses: dotted where it imports them, words elsewhere."""
    tree = trees()[path]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {
                f"{node.module}.{one.name}" for one in node.names if is_private_of_torch(f"{node.module}.{one.name}")
            }
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            found.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg is not None and is_private(node.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_NAME:
            found |= {one.value for one in node.args if isinstance(one, ast.Constant) and is_private(str(one.value))}
        elif isinstance(node, ast.Constant) and IN_TEXT.fullmatch(str(node.value)):
            found.add(node.value)
    return found


def test_the_table_lists_what_the_room_uses() -> None:
    # A module that is imported from is listed by what is imported.
    known = set(NAMES) | {word for name in NAMES for word in name.split(".") if is_private(word)}
    known |= {name.rpartition(".")[0] for name in NAMES}
    unlisted = {path.stem: {word for word in used(path) if word not in known} for path in within()}
    assert {name: words for name, words in unlisted.items() if words} == {}


def words_of_the_room() -> set[str]:
    found: set[str] = set()
    for path in within():
        for node in ast.walk(trees()[path]):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.ImportFrom):
                found |= {alias.name for alias in node.names} | {str(node.module).rpartition(".")[2]}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value.rpartition(".")[2])
            elif isinstance(node, ast.keyword) and node.arg is not None:
                found.add(node.arg)
            elif isinstance(node, ast.FunctionDef):
                found.add(node.name)
    return found


def test_the_room_uses_what_the_table_lists() -> None:
    words = words_of_the_room()
    assert [name for name in NAMES if name.rpartition(".")[2] not in words] == []


def test_the_table_lists_private_names_with_their_purpose() -> None:
    assert all(is_private_of_torch(name) and purpose for name, purpose in NAMES.items())
