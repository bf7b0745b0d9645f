# SPDX-License-Identifier: Apache-2.0
"""The drawing of layers in docs/architecture.md, held against what the code really imports."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "rankwise"
DRAWING = ROOT / "docs" / "architecture.md"
PURE = (
    "errors",
    "version",
    "torch_versions",
    "world",
    "network",
    "environments",
    "device.kinds",
    "data.permutation",
    "data.shards",
    "checkpoint.manifest",
)
VAGUE = {
    "utils",
    "util",
    "helpers",
    "helper",
    "common",
    "misc",
    "manager",
    "managers",
    "tools",
    "base",
}
MAY_READ_VARIABLES = ("environments.process", "launch")
# launch.worker shows the text a script gives to sys.exit(), as Python itself does.
MAY_PRINT = ("cli", "log", "progress", "launch.worker")
LONGEST_MODULE_LINES = 400


@dataclass
class Module:
    """One file of the package, as its syntax tree tells."""

    name: str
    path: Path
    tree: ast.Module
    imports: set[str] = field(default_factory=set)
    """Every module it imports, by full name, wherever in the file."""

    @property
    def room(self) -> str:
        """The first word of its name within the package; the package itself is a room too."""
        return self.name.split(".")[1] if "." in self.name else self.name


@cache
def modules() -> dict[str, Module]:
    found: dict[str, Module] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        words = ["rankwise", *path.relative_to(SOURCE).with_suffix("").parts]
        name = ".".join(words[:-1] if words[-1] == "__init__" else words)
        found[name] = Module(name, path, ast.parse(path.read_text(), str(path)))
    for module in found.values():
        module.imports = set(imports_of(module, set(found)))
    return found


def imports_of(module: Module, known: set[str]) -> list[str]:
    names: list[str] = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.path}:{node.lineno} imports relatively"
            whole = str(node.module)
            # `from package import module` names a module, `from module import thing` does not.
            inner = [f"{whole}.{alias.name}" for alias in node.names]
            names += [one if one in known else whole for one in inner]
    return names


@cache
def layers() -> list[list[str]]:
    block = re.search(r"```layers\n(.*?)```", DRAWING.read_text(), re.DOTALL)
    assert block is not None, f"{DRAWING} has no block ```layers"
    return [line.split() for line in block[1].splitlines() if line.strip()]


def layer_of(room: str) -> int:
    """Number of the layer, from 0 at the top."""
    return next(number for number, rooms in enumerate(layers()) if room in rooms)


def own_imports(module: Module) -> set[str]:
    return {name for name in module.imports if name.split(".")[0] == "rankwise"}


def is_in(name: str, places: tuple[str, ...]) -> bool:
    """Whether a module is one of ``places``, or inside one."""
    return any(f"{name}.".startswith(f"rankwise.{place}.") for place in places)


def test_the_drawing_names_every_room_once_and_no_other() -> None:
    drawn = [room for rooms in layers() for room in rooms]
    existing = {module.room for module in modules().values()} - {"rankwise", "__main__"}
    assert sorted(drawn) == sorted(existing)


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_point_down(name: str) -> None:
    module = modules()[name]
    if module.room in {"rankwise", "__main__"}:
        return
    wrong = [
        other
        for other in own_imports(module)
        # Importing the package itself would be importing every room.
        if other == "rankwise"
        or (modules()[other].room != module.room and layer_of(modules()[other].room) <= layer_of(module.room))
    ]
    assert wrong == [], f"{name} stands beside or below {wrong}"


def test_nothing_imports_the_command() -> None:
    importers = [name for name, module in modules().items() if "rankwise.__main__" in module.imports]
    assert importers == []


def test_no_module_reaches_itself_through_its_imports() -> None:
    finished: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " imports ".join([*way[way.index(name) :], name])
        if name not in finished:
            for other in sorted(own_imports(modules()[name])):
                visit(other, (*way, name))
            finished.add(name)

    for name in modules():
        visit(name, ())


@pytest.mark.parametrize("name", [name for name in sorted(modules()) if is_in(name, PURE)])
def test_pure_modules_import_no_torch_and_nothing_that_does(name: str) -> None:
    module = modules()[name]
    assert {other for other in module.imports if other.split(".")[0] == "torch"} == set()
    assert {other for other in own_imports(module) if not is_in(other, PURE)} == set()


def test_every_pure_module_exists() -> None:
    assert [place for place in PURE if not any(is_in(name, (place,)) for name in modules())] == []


def reads_variables(node: ast.AST) -> bool:
    words = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        return any(alias.name in words for alias in node.names)
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and node.attr in words
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("os.environ['A']", True),
        ("os.getenv('A')", True),
        ("from os import environ", True),
        ("os.path", False),
        ("self.environ", False),
    ],
)
def test_reading_a_variable_is_seen(source: str, expected: bool) -> None:
    assert any(reads_variables(node) for node in ast.walk(ast.parse(source))) is expected


@pytest.mark.parametrize("name", sorted(modules()))
def test_variables_are_read_in_one_place(name: str) -> None:
    module = modules()[name]
    lines = [node.lineno for node in ast.walk(module.tree) if reads_variables(node)]  # type: ignore[attr-defined]
    assert lines == [] or is_in(name, MAY_READ_VARIABLES), f"{module.path} lines {lines}"


def is_print(node: ast.AST) -> bool:
    """Whether a node prints to where people read; a file given to print is the caller's matter."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"


@pytest.mark.parametrize("name", sorted(modules()))
def test_only_the_command_line_and_the_log_print(name: str) -> None:
    module = modules()[name]
    lines = [node.lineno for node in ast.walk(module.tree) if is_print(node)]  # type: ignore[attr-defined]
    assert lines == [] or is_in(name, MAY_PRINT), f"{module.path} lines {lines}"


@pytest.mark.parametrize("name", sorted(modules()))
def test_modules_are_named_short_and_introduced(name: str) -> None:
    module = modules()[name]
    text = module.path.read_text()
    assert not VAGUE & set(name.split("."))
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert ast.get_docstring(module.tree), f"{module.path} does not say what it holds"
    assert len(text.splitlines()) <= LONGEST_MODULE_LINES


@pytest.mark.parametrize("name", [name for name in sorted(modules()) if is_in(name, ("checkpoint",))])
def test_checkpoints_hold_no_pickle(name: str) -> None:
    module = modules()[name]
    assert {"pickle", "cloudpickle", "dill", "shelve", "marshal"} & module.imports == set()
    calls = {ast.unparse(node.func) for node in ast.walk(module.tree) if isinstance(node, ast.Call)}
    assert {"torch.save", "torch.load"} & calls == set()
