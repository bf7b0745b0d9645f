# SPDX-License-Identifier: Apache-2.0
"""``import horovod`` without Horovod: rankwise's modules under another library's name, where a program requests it.

The names are entries of ``sys.modules`` that lead to rankwise's own modules. A package of the library's name is found
by ``sys.path``, which ranks and processes of multiprocessing receive, so the alias works there too.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.machinery import ModuleSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportAlias:
    """What a library's name is to mean."""

    name: str
    """As it is imported: ``horovod``."""
    library: str
    """As people write it: ``Horovod``."""
    package: str
    """The package of rankwise that stands in."""
    usual_import: str
    """What a script can write where the library itself is installed."""
    on_path: str
    """The folder that holds the package ``name``; comes after everything else on ``sys.path``, where it can."""
    modules: Mapping[str, str]
    """What a script may import, by its whole name, and the module of rankwise that it gets."""
    instead: Mapping[str, str]
    """What is not offered, by its whole name, and what to do in its place."""


def provide(alias: ImportAlias) -> None:
    """Have ``import`` of the library's name give rankwise's package, from now on in this process.

    Processes that multiprocessing starts have it too. Calling it again does nothing.

    Raises:
        ConfigurationError: The library itself is installed here, or has been imported already.
    """
    present = sys.modules.get(alias.name)
    if present is not None:
        origin = present.__spec__ and present.__spec__.origin
        if present is sys.modules.get(alias.package) or (origin or "").startswith(alias.on_path):
            return
        raise _both_exist(alias, f"it has been imported from {getattr(present, '__file__', None) or 'elsewhere'}")
    check_not_installed(alias)
    if alias.on_path not in sys.path:
        sys.path.append(alias.on_path)
    importlib.invalidate_caches()
    importlib.import_module(alias.name)


def check_not_installed(alias: ImportAlias) -> None:
    """Hold that the library itself is nowhere on ``sys.path``, where ``on_path`` may come before it.

    Raises:
        ConfigurationError: It is installed here.
    """
    found = importlib.machinery.PathFinder.find_spec(alias.name, [one for one in sys.path if one != alias.on_path])
    # A folder of that name without an __init__.py is not the library, and this alias precedes it.
    if found is not None and found.origin is not None:
        raise _both_exist(alias, f"it is installed: {found.origin}")


def register(alias: ImportAlias) -> None:
    """Enter the modules, once the package itself is in ``sys.modules``; an import of any other is an error in words."""
    for name, target in alias.modules.items():
        module = importlib.import_module(target)
        sys.modules[name] = module
        # `import a.b.c` reads c from b: what is taken from sys.modules is not set there by Python.
        parent, _, last = name.rpartition(".")
        if not hasattr(sys.modules[parent], last):
            vars(sys.modules[parent])[last] = module
    sys.meta_path.insert(0, _Refusing(alias))


class _Refusing:
    """Finds no module: says what to use in place of a module that the alias lacks."""

    def __init__(self, alias: ImportAlias) -> None:
        self._alias = alias

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Raise for what is below the library, since what is offered has been imported; leave the rest to others."""
        del path, target
        alias = self._alias
        if not name.startswith(f"{alias.name}."):
            return None
        instead = next((text for known, text in alias.instead.items() if f"{name}.".startswith(f"{known}.")), None)
        offered = f"it has {', '.join(alias.modules)}"
        message = f"rankwise stands in for {alias.library} and has no {name}: {instead or offered}"
        raise ModuleNotFoundError(message, name=name)


def _both_exist(alias: ImportAlias, evidence: str) -> ConfigurationError:
    return ConfigurationError(
        f"The name `{alias.name}` was requested for {alias.package}, but {alias.library} itself is present.",
        evidence=evidence,
        do=f"write `{alias.usual_import}` in the script, or run it where {alias.library} is not installed",
    )
