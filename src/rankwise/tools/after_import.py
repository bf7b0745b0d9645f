# SPDX-License-Identifier: Apache-2.0
"""Attributes of a module replaced as soon as it has been imported, so that no module is imported for that alone."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from rankwise.tools.replacing import Replaced

    Change = Callable[[ModuleType], Replaced]
    """Replaces attributes of a module, and returns what they were."""


@contextmanager
def changed_after_import(changes: Mapping[str, Change]) -> Generator[None]:
    """Change modules, by their names, once they are imported inside the block, or now if they are imported already."""
    before: Replaced = []
    changed: set[str] = set()

    def change(module: ModuleType) -> None:
        # OpenCV's module imports another one of its own name, and takes everything from it.
        if module.__name__ not in changed:
            changed.add(module.__name__)
            before.extend(changes[module.__name__](module))

    for name in sorted(changes.keys() & sys.modules.keys()):
        change(sys.modules[name])
    finder = _Finder(changes.keys(), change)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


class _Finder(MetaPathFinder):
    """Finds modules as Python does, with a loader that changes them."""

    def __init__(self, names: Collection[str], change: Callable[[ModuleType], None]) -> None:
        self._names = names
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec with the other loader."""
        if fullname not in self._names:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _ChangingLoader(spec.loader, self._change)
        return spec


class _ChangingLoader(Loader):
    """Loads a module, changes it, and leaves it with its own loader."""

    def __init__(self, own: Loader, change: Callable[[ModuleType], None]) -> None:
        self._own = own
        self._change = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module that its own loader creates."""
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then change it."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        module.__loader__ = self._own
        self._own.exec_module(module)
        self._change(module)
