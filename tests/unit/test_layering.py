# SPDX-License-Identifier: Apache-2.0
"""The drawing of layers in docs/architecture.md, held against what the code really imports."""

from __future__ import annotations

import ast
import re
import runpy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import rankwise

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "rankwise"
PURE = (
    "errors",
    "version",
    "world.torch_versions",
    "world.facts",
    "world.network",
    "world.environments",
    "world.processes",
    "world.device.kinds",
    "data.epoch_order",
    "data.shards",
    "checkpoint.manifest",
    "charts",
    "insight.html",
    "insight.tables",
    "verify.records",
    "verify.compare",
    "verify.causes",
    "verify.mistakes",
    "verify.conclude",
    "verify.report",
)
STRATEGIES = ("replicate", "shard", "tensor_parallel", "pipeline", "compress")
FACES = (
    "auto.replacing",
    "auto.script",
    "compress.allgather_channel",
    "compress.methods",
    "doctor.checks",
    "doctor.examine",
    "insight.checkpoint_contents",
    "insight.html",
    "insight.tables",
    "insight.layouts",
    "insight.page",
    "insight.measuring",
    "insight.trace_events",
    "insight.run_records",
    "launch.fork_server.entrypoint",
    "launch.function.call",
    "launch.function.launch",
    "launch.hosts.host_list",
    "launch.hosts.on_ray",
    "launch.hosts.ray_cluster",
    "launch.hosts.ssh",
    "launch.inspect.control_socket",
    "launch.inspect.stacks",
    "launch.job_size",
    "launch.kubernetes",
    "launch.messages",
    "launch.options",
    "launch.report.failure_report",
    "launch.slurm",
    "launch.start",
    "pipeline.plan",
    "replicate.batchnorm",
    "replicate.blocks",
    "replicate.bucket",
    "replicate.device_mesh",
    "replicate.device_of_inputs",
    "replicate.global_statistics",
    "replicate.gradient_buckets",
    "replicate.gradient_sync",
    "replicate.loss.hooks",
    "replicate.loss.loss_on_ranks",
    "replicate.loss.reports",
    "replicate.no_sync_and_weight",
    "replicate.own_hooks",
    "replicate.random_numbers.batch_tracer",
    "replicate.random_numbers.model_draws",
    "replicate.random_numbers.sample_layout",
    "replicate.random_numbers.scope",
    "replicate.random_numbers.source",
    "replicate.replicate",
    "replicate.same_model",
    "replicate.self_check",
    "replicate.strategy_registry",
    "verify.runs",
    "verify.report",
)
"""What rooms of the rest may import of launch, of a strategy and of each other."""
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers", "base"}
MAY_READ_VARIABLES = ("world.environments.process", "launch")
# The worker shows the text a script gives to sys.exit(), as Python itself does.
MAY_PRINT = ("cli", "log", "progress", "launch.fork_server.worker")
PICKLES = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
READS_VARIABLES = {"environ", "environb", "getenv", "putenv", "unsetenv"}


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


def own_imports(module: Module) -> set[str]:
    return {name for name in module.imports if name.split(".")[0] == "rankwise"}


def is_in(name: str, places: tuple[str, ...]) -> bool:
    """Whether a module is one of ``places``, or inside one."""
    return any(f"{name}.".startswith(f"rankwise.{place}.") for place in places)


def find_cycle(name: str, way: tuple[str, ...], finished: set[str]) -> tuple[str, ...]:
    if name in way:
        return (*way[way.index(name) :], name)
    if name not in finished:
        for other in sorted(own_imports(modules()[name])):
            if cycle := find_cycle(other, (*way, name), finished):
                return cycle
        finished.add(name)
    return ()


def reads_variables(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        return any(alias.name in READS_VARIABLES for alias in node.names)
    if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
        return False
    return node.value.id == "os" and node.attr in READS_VARIABLES


def prints(node: ast.AST) -> bool:
    """Whether a node prints to where people read; a file given to print is the caller's matter."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"


def test_imports_point_down_and_in_no_circle() -> None:
    drawing = runpy.run_path(str(ROOT / "docs" / "architecture.py"))
    layers: list[list[str]] = drawing["layers"]().all
    rooms = {module.room for module in modules().values()} - {"rankwise", "__main__"}
    assert sorted(room for line in layers for room in line) == sorted(rooms)
    layer_of = {room: number for number, line in enumerate(layers) for room in line}
    wrong = [
        f"{module.name} imports {other}"
        for module in modules().values()
        if module.room in rooms
        for other in own_imports(module)
        # Importing the package itself would be importing every room.
        if (room := modules()[other].room) == "rankwise"
        or (room != module.room and layer_of[room] <= layer_of[module.room])
    ]
    assert wrong == []
    assert [name for name, module in modules().items() if "rankwise.__main__" in module.imports] == []
    finished: set[str] = set()
    assert [cycle for name in modules() if (cycle := find_cycle(name, (), finished))] == []
    assert drawing["PICTURE"].read_text() == drawing["draw"](), "run python docs/architecture.py"


def test_the_core_imports_no_rest_and_the_rest_only_faces_of_the_core() -> None:
    drawing = runpy.run_path(str(ROOT / "docs" / "architecture.py"))
    rest = {room for line in drawing["layers"]().rest for room in line}
    used: dict[str, list[str]] = {}
    wrong: list[str] = []
    for name, module in modules().items():
        for other in own_imports(module):
            room = modules()[other].room
            if room in rest and module.room not in rest and name != "rankwise.__main__":
                # The package itself names public calls for type checkers, and imports each on first use.
                wrong += [] if name == "rankwise" else [f"{name} is core and imports {other}"]
            if (module.room == "launch" and room in STRATEGIES) or (room == "launch" and module.room in STRATEGIES):
                wrong.append(f"{name} imports {other}: launch and the strategies never meet")
            if module.room in rest and room != module.room and room in (*STRATEGIES, "launch", *rest):
                used.setdefault(other, []).append(name)
    wrong += [f"{', '.join(users)} import {name}: no face" for name, users in used.items() if not is_in(name, FACES)]
    assert wrong == []
    assert [face for face in FACES if f"rankwise.{face}" not in used] == [], "a face that nobody sees"


def test_pure_modules_import_no_torch_and_nothing_that_does() -> None:
    assert [place for place in PURE if not any(is_in(name, (place,)) for name in modules())] == []
    wrong = [
        f"{name} imports {other}"
        for name, module in modules().items()
        if is_in(name, PURE)
        for other in module.imports
        if other.split(".")[0] == "torch" or (other.split(".")[0] == "rankwise" and not is_in(other, PURE))
    ]
    assert wrong == []


def test_variables_printing_and_pickles_stay_where_they_belong() -> None:
    def nodes(text: str) -> list[ast.AST]:
        return list(ast.walk(ast.parse(text)))

    assert all(any(map(reads_variables, nodes(text))) for text in ("os.environ['A']", "from os import environ"))
    assert not any(map(reads_variables, [*nodes("os.path"), *nodes("self.environ")]))
    wrong: list[str] = []
    for name, module in modules().items():
        for node in ast.walk(module.tree):
            if reads_variables(node) and not is_in(name, MAY_READ_VARIABLES):
                wrong.append(f"{name} reads a variable: {ast.unparse(node)}")
            if prints(node) and not is_in(name, MAY_PRINT):
                wrong.append(f"{name} prints: {ast.unparse(node)}")
            if is_in(name, ("checkpoint",)) and isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                wrong += [f"{name} calls {called}"] if called in {"torch.save", "torch.load"} else []
        if is_in(name, ("checkpoint",)):
            wrong += [f"{name} imports {pickle}" for pickle in PICKLES & module.imports]
    assert wrong == []


def test_modules_are_named_for_what_they_hold_and_introduced() -> None:
    wrong: list[str] = []
    for name, module in modules().items():
        wrong += [f"{name} is called {word}" for word in VAGUE & set(name.split("."))]
        if not module.path.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n"):
            wrong.append(f"{name} names no licence")
        if not ast.get_docstring(module.tree):
            wrong.append(f"{name} does not say what it holds")
    assert wrong == []


def test_a_module_that_code_knows_by_name_exists() -> None:
    """A prefix of the names of modules that have moved matches nothing, and nothing fails."""
    known = {*modules(), *(f"rankwise.{name}" for name in rankwise.__all__)}
    wrong = [
        f"{name} names {node.value}"
        for name, module in modules().items()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"rankwise(\.[a-z_]+)+\.?", node.value)
        and node.value.rstrip(".") not in known
    ]
    assert wrong == []


def test_a_path_that_code_builds_from_its_own_exists() -> None:
    own = re.compile(r"""Path\(__file__\)\.parents?(?:\[(\d)\])?((?: / ["'][\w.]+["'])+)""")
    found = [
        module.path.parents[int(match[1] or 0)].joinpath(*re.findall(r"[\w.]+", match[2]))
        for module in modules().values()
        for match in own.finditer(module.path.read_text())
    ]
    assert found
    assert [path for path in found if not path.exists()] == []


def test_the_architecture_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| `([a-z_/]+)` \|$", text.split("## Where is ...?")[1].split("\n## ")[0], re.MULTILINE)
    assert len(rows) == 25
    assert [row for row in rows if not (SOURCE / f"{row}.py").is_file()] == []
