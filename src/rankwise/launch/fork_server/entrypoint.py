# SPDX-License-Identifier: Apache-2.0
"""What a rank runs: a script, a module or a function, checked before any rank starts, run as ``__main__``.

Finding a target imports none of the user's code; only :func:`run_as_main` runs it, in a rank. A command that is not a
Python script, or has options for Python itself, replaces a rank's process. Imported by the command line, by the worker,
and by the module that runs Horovod's commands.
"""

from __future__ import annotations

import ast
import difflib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import shutil
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, NoReturn, Protocol

from rankwise.errors import ConfigurationError, LaunchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec

SPELLINGS = ("--local_rank", "--local-rank")
"""Torch's launcher passed the first until 2.0, and passes the second since."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """A Python file, as ``python path arguments`` runs it."""

    path: str
    """As the user wrote it: ``sys.argv[0]``."""
    code: CodeType
    """The file, compiled once for all ranks and restarts."""
    arguments: tuple[str, ...]
    """``sys.argv[1:]``."""
    local_rank_option: str | None = None
    """The option that passes each rank its local rank, before all other arguments."""

    def __str__(self) -> str:
        return self.path

    @property
    def names(self) -> frozenset[str]:
        """The names that it uses."""
        return names_in(self.code)


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """A module or package, as ``python -m name arguments`` runs it."""

    name: str
    arguments: tuple[str, ...]
    local_rank_option: str | None = None
    """As for a script."""
    names: frozenset[str] = frozenset()
    """The names that it uses, if it is a file of Python."""

    def __str__(self) -> str:
        return f"-m {self.name}"


class Runnable(Protocol):
    """A target that runs itself in a rank: a function, sent by the process that launches it."""

    @property
    def names(self) -> frozenset[str]:
        """Names that it uses, and modules that it imports: what is worth importing before ranks are forked."""
        ...

    def run(self) -> None:
        """Run; exceptions propagate."""


Target = Script | Module | Runnable


def find_target(name: str, arguments: Sequence[str], *, is_module: bool) -> Script | Module:
    """Find a script, or a module; raises as :func:`find_script` and :func:`find_module` do."""
    return find_module(name, arguments) if is_module else find_script(name, arguments)


def find_script(path: str, arguments: Sequence[str]) -> Script:
    """Read and compile a script without running it.

    Raises:
        ConfigurationError: there is no such file, it is a folder, or it cannot be read.
        LaunchError: it has a syntax error; the evidence shows the line.
    """
    if Path(path).is_dir():
        raise ConfigurationError(
            f"{path!r} is a folder, not a Python script.",
            do="pass a script in it, or -m for a package that has a __main__.py",
        )
    try:
        source = Path(path).read_bytes()
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"Script {path!r} does not exist.",
            evidence=f"the working directory is {Path.cwd()}",
            do=_similar_script(Path(path)),
        ) from error
    except OSError as error:
        raise ConfigurationError(f"The script {path!r} cannot be read: {error.strerror}.") from error
    # Python itself uses the absolute path, in tracebacks and in __file__.
    code = _compile(source, str(Path(path).absolute()))
    return Script(
        path=path, code=code, arguments=tuple(arguments), local_rank_option=_local_rank_option(source, arguments)
    )


def _similar_script(path: Path) -> str | None:
    """Return a hint on the script in the same folder whose name is most like that of ``path``."""
    stems = [one.stem for one in path.parent.glob("*.py")]
    nearest = difflib.get_close_matches(path.name.removesuffix(".py"), stems, n=1)
    return f"did you mean {path.parent / nearest[0]}.py?" if nearest else None


def find_module(name: str, arguments: Sequence[str]) -> Module:
    """Find a module and check its syntax, without importing it or its packages.

    Raises:
        ConfigurationError: there is no such module, or it is a package without ``__main__``.
        LaunchError: it has a syntax error; the evidence shows the line.
    """
    spec = _find_unimported(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_unimported(f"{name}.__main__")
        if spec is None:
            raise ConfigurationError(
                f"{name!r} is a package without a __main__.py, which cannot be run.",
                do=f"pass a module in it: -m {name}.train",
            )
    if spec is None:
        raise ConfigurationError(
            f"Module {name!r} was not found.",
            evidence=f"searched the working directory {Path.cwd()} and the installed packages",
            do="for a script use its path, without -m" if name.endswith(".py") else None,
        )
    option, names = None, frozenset[str]()
    if spec.origin is not None and spec.origin.endswith(".py"):
        source = Path(spec.origin).read_bytes()
        names = names_in(_compile(source, spec.origin))
        option = _local_rank_option(source, arguments)
    return Module(name=name, arguments=tuple(arguments), local_rank_option=option, names=names)


def names_in(code: CodeType) -> frozenset[str]:
    """Return the names that ``code`` and the functions in it read or import; those of modules with their dots."""
    inner = (names_in(part) for part in code.co_consts if isinstance(part, CodeType))
    return frozenset(code.co_names).union(*inner)


def run_as_main(target: Target) -> None:
    """Run the target as this process's ``__main__``, as Python itself would.

    Replaces ``sys.argv``, ``sys.path[0]`` and ``sys.modules["__main__"]``; exceptions propagate.
    """
    importlib.invalidate_caches()
    if isinstance(target, Script):
        _run_script(target)
    elif isinstance(target, Module):
        _run_module(target)
    else:
        target.run()


def _run_script(target: Script) -> None:
    path = Path(target.path).absolute()
    loader = importlib.machinery.SourceFileLoader("__main__", str(path))
    main = _fresh_main(_arguments(target), argv0=target.path, first_path=str(path.resolve().parent))
    main.__file__ = str(path)
    main.__loader__ = loader
    main.__dict__["__cached__"] = None
    exec(target.code, main.__dict__)  # noqa: S102 - running the user's script is the purpose


def _run_module(target: Module) -> None:
    main = _fresh_main(_arguments(target), argv0="-m", first_path=str(Path.cwd()))
    spec = importlib.util.find_spec(target.name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{target.name}.__main__")
    loader = spec.loader if spec is not None else None
    code = loader.get_code(spec.name) if isinstance(loader, importlib.abc.InspectLoader) and spec else None
    if spec is None or code is None:
        raise ImportError(f"no code was found for {target.name}", name=target.name)
    main.__spec__ = spec
    main.__loader__ = loader
    main.__package__ = spec.parent
    main.__dict__["__cached__"] = spec.cached
    if spec.origin is not None:
        main.__file__ = spec.origin
        sys.argv[0] = spec.origin
    exec(code, main.__dict__)  # noqa: S102 - running the user's module is the purpose


def _local_rank_option(source: bytes, arguments: Sequence[str]) -> str | None:
    return None if passes_local_rank(arguments) else local_rank_option_in(source)


def _arguments(target: Script | Module) -> tuple[str, ...]:
    option = target.local_rank_option
    # First, as torch.distributed.launch does: arguments after a script's positional ones may belong to those.
    return target.arguments if option is None else (f"{option}={os.environ['LOCAL_RANK']}", *target.arguments)


def _fresh_main(arguments: Sequence[str], *, argv0: str, first_path: str) -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    vars(main)["__annotations__"] = {}
    sys.modules["__main__"] = main
    sys.argv[:] = [argv0, *arguments]
    if not sys.flags.safe_path and sys.path:
        # Replaces the launcher's own first entry, which Python set for the launcher.
        sys.path[0] = first_path
    return main


def _find_unimported(name: str) -> ModuleSpec | None:
    """Find a module by its dotted name without importing the packages around it."""
    path: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        spec = _first_spec(".".join(parts[:number]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
        if number < len(parts) and spec.submodule_search_locations is None:
            return None
    return spec


def _first_spec(name: str, path: list[str] | None) -> ModuleSpec | None:
    if path is None:
        own = sys.path if sys.flags.safe_path else [str(Path.cwd()), *sys.path[1:]]
        spec = importlib.machinery.PathFinder.find_spec(name, own)
        if spec is not None:
            return spec
    return next(filter(None, (finder.find_spec(name, path) for finder in sys.meta_path)), None)


def _compile(source: bytes, path: str) -> CodeType:
    try:
        return compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        text = "".join(traceback.format_exception_only(error)).rstrip()
        raise LaunchError(f"{path} is not valid Python; no rank was started.", evidence=text) from error


# -- scripts that accept --local_rank, as those written for torch.distributed.launch do ----------------------


def local_rank_option_in(source: bytes) -> str | None:
    """Return the spelling that the parser of a script accepts, or ``None`` if it accepts none.

    Only what the source itself declares counts, by ``add_argument`` of a parser without subcommands: an option that
    a parser does not know would end a script.

    Args:
        source: of the script, valid Python.
    """
    if not any(spelling.encode() in source for spelling in SPELLINGS):
        return None
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    if any(_method(call) == "add_subparsers" for call in calls):
        return None
    declared = (
        word for call in calls if _method(call) == "add_argument" and _takes_value(call) for word in _words(call)
    )
    return next((word for word in declared if word in SPELLINGS), None)


def passes_local_rank(arguments: Sequence[str]) -> bool:
    """Return whether the option has already been passed."""
    return any(argument.partition("=")[0] in SPELLINGS for argument in arguments)


def _method(call: ast.Call) -> str | None:
    return call.func.attr if isinstance(call.func, ast.Attribute) else None


def _words(call: ast.Call) -> Iterator[str]:
    for argument in call.args:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value


def _takes_value(call: ast.Call) -> bool:
    """Return whether an option takes one value: argparse's default, and its ``store``."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    action = given.get("action")
    return "nargs" not in given and (action is None or (isinstance(action, ast.Constant) and action.value == "store"))


# -- a command that replaces a rank's process ----------------------------------------------------------

IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores, but that should end other commands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCommand:
    """An executable and its arguments."""

    executable: str
    words: tuple[str, ...]

    def replace_this_process(self, python_path: Sequence[str] = ()) -> NoReturn:
        """Run it in place of this process: its exit code and the signals it receives are the rank's.

        Args:
            python_path: further folders that its Python programs import from, after those of ``PYTHONPATH``.

        Raises:
            ConfigurationError: the system cannot run it.

        Source: execve(2).
        """
        variables = {**os.environ, "PYTHONPATH": _joined(os.environ.get("PYTHONPATH", ""), python_path)}
        for number in IGNORED_BY_PYTHON:
            signal.signal(number, signal.SIG_DFL)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            os.execve(self.executable, self.words, variables)  # noqa: S606 - running the user's command is the purpose
        except OSError as error:
            raise ConfigurationError(
                f"The command {self.words[0]!r} cannot be run: {error.strerror}.",
                evidence=f"executable: {self.executable}",
                do="pass a program, or a script that starts with #! and is executable (chmod +x)",
            ) from error


def is_python(word: str) -> bool:
    """Return whether the first word of a command is Python."""
    return re.fullmatch(r"python[0-9.]*", Path(word).name) is not None


def find_command(name: str, arguments: Sequence[str]) -> RankCommand:
    """Find the executable for a command's first word; Python is the one that runs this process.

    Raises:
        ConfigurationError: there is no such program.
    """
    if is_python(name):
        # By its path: Python locates its packages by the name it was called with.
        return RankCommand(executable=sys.executable, words=(sys.executable, *arguments))
    found = shutil.which(name)
    if found is None:
        raise ConfigurationError(
            f"Command {name!r} was not found.",
            evidence=f"searched {os.environ.get('PATH', '')}",
            do="for a script in this folder write ./ before its name; it must be executable (chmod +x)",
        )
    return RankCommand(executable=found, words=(name, *arguments))


def _joined(present: str, more: Sequence[str]) -> str:
    entries = present.split(os.pathsep) if present else []
    return os.pathsep.join([*entries, *(path for path in more if path not in entries)])
