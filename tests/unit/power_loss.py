# SPDX-License-Identifier: Apache-2.0
"""A disk that loses its power: follows what a process does to a folder, and gives what may be left of it.

POSIX promises only what ``fsync`` was called for: of a file its bytes, of a folder its names. Everything else is lost,
or is there, each file and folder by itself.
"""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pytest

Folder = dict[str, int]
"""Numbers of the files and folders in it, by name."""
Things = dict[int, "Folder | bytes"]
Tree = dict[str, "Tree | bytes"]

CHANGING = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "fsync")
"""Calls of ``os`` before which the power may go."""


class Disk:
    """What a folder holds, and what of it is on disk for good."""

    def __init__(self, root: Path) -> None:
        """Follow ``root``; what is there already is on disk."""
        self._root = root
        self._held: dict[int, int] = {}
        self.left: list[Tree] = []
        """What may be left after each moment of the block, without repetitions."""
        self._synced = self._look()

    @contextmanager
    def followed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Note what may be left if the power goes at any moment of the block."""
        with monkeypatch.context() as patch:
            for name in CHANGING:
                patch.setattr(os, name, partial(self._change, name, getattr(os, name)))
            try:
                yield
                self.lose_power()
            finally:
                for handle in self._held.values():
                    os.close(handle)

    def after(self) -> list[Tree]:
        """Return what may be left if the power goes now, after the block."""
        return list(self._possible())

    def lose_power(self) -> None:
        """Note what may be left if the power goes now."""
        self.left += [tree for tree in self._possible() if tree not in self.left]

    def _change(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.lose_power()
        result = call(*args, **kwargs)
        if name == "fsync":
            self._sync(os.fstat(args[0]).st_ino)
        return result

    def _sync(self, number: int) -> None:
        now = self._look()
        if number in now:
            self._synced[number] = now[number]

    def _look(self) -> Things:
        """Return everything that is there, by number."""
        found: Things = {}
        todo = [self._root]
        while todo:
            path = todo.pop()
            number = self._number(path)
            if not path.is_dir():
                found[number] = path.read_bytes()
                continue
            found[number] = {inner.name: self._number(inner) for inner in path.iterdir()}
            todo += path.iterdir()
        return found

    def _number(self, path: Path) -> int:
        """Return the number of a file or folder, which is held so that nothing else gets the same."""
        number = path.stat().st_ino
        if number not in self._held:
            self._held[number] = os.open(path, os.O_RDONLY)
        return number

    def _possible(self) -> Iterator[Tree]:
        """Yield what may be left now: everything lost or kept that is not on disk, or all but one."""
        now = self._look()
        for number, handle in self._held.items():
            # What was removed has lost its names too.
            is_folder = stat.S_ISDIR(os.fstat(handle).st_mode)
            now.setdefault(number, {} if is_folder else self._synced.get(number, b""))
        synced: Things = {n: self._synced.get(n, {} if isinstance(thing, dict) else b"") for n, thing in now.items()}
        differ = [number for number in now if now[number] != synced[number]]
        yield self._tree(synced)
        yield self._tree(now)
        for number in differ:
            yield self._tree({**synced, number: now[number]})
            yield self._tree({**now, number: synced[number]})

    def _tree(self, things: Things) -> Tree:
        def below(number: int) -> Tree | bytes:
            thing = things[number]
            return thing if isinstance(thing, bytes) else {name: below(inner) for name, inner in sorted(thing.items())}

        tree = below(self._root.stat().st_ino)
        assert isinstance(tree, dict)
        return tree


def write(tree: Tree, path: Path) -> None:
    """Make a folder of what was left."""
    path.mkdir()
    for name, inner in tree.items():
        if isinstance(inner, bytes):
            (path / name).write_bytes(inner)
        else:
            write(inner, path / name)
