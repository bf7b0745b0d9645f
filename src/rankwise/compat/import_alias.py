# SPDX-License-Identifier: Apache-2.0
"""``import horovod`` without Horovod: rankwise's modules under another library's name, if a program requests it.

The names are entries of ``sys.modules`` that refer to rankwise's own modules. A package of the library's name is found
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
    """A library's name, and the modules that it refers to."""

    name: str
    """The name to import: ``horovod``."""
    library: str
    """The library's name in texts: ``Horovod``."""
    package: str
    """The package of rankwise that replaces it."""
    usual_import: str
    """The import to write if the library itself is installed."""
    on_path: str
    """The folder that holds the package ``name``; the last on ``sys.path``, if possible."""
    modules: Mapping[str, str]
    """The modules that a script may import, by their full names, and the modules of rankwise that it gets."""
    instead: Mapping[str, str]
    """Modules that are not offered, by their full names, and what to do instead."""


def provide(alias: ImportAlias) -> None:
    """Make ``import`` of the library's name give rankwise's package: see each library's ``provide``."""
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
    """Raise a ConfigurationError if the library itself is on ``sys.path``, where ``on_path`` may come before it."""
    found = importlib.machinery.PathFinder.find_spec(alias.name, [one for one in sys.path if one != alias.on_path])
    # A folder of that name without an __init__.py is not the library, and this alias precedes it.
    if found is not None and found.origin is not None:
        raise _both_exist(alias, f"it is installed: {found.origin}")


def register(alias: ImportAlias) -> None:
    """Add the modules to ``sys.modules``, after the package itself; other imports raise."""
    for name, target in alias.modules.items():
        module = importlib.import_module(target)
        sys.modules[name] = module
        # `import a.b.c` reads c from b; Python does not set it there for a module that sys.modules holds already.
        parent, _, last = name.rpartition(".")
        if not hasattr(sys.modules[parent], last):
            vars(sys.modules[parent])[last] = module
    sys.meta_path.insert(0, _Refusing(alias))


class _Refusing:
    """A finder that finds no module, and names a replacement for one that the alias lacks."""

    def __init__(self, alias: ImportAlias) -> None:
        self._alias = alias

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Raise for a module of the library, since all offered ones are in ``sys.modules``; ignore others."""
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
