# SPDX-License-Identifier: Apache-2.0
"""HDF5 files that h5py writes: by rank zero; the other ranks write and read copies of their own while they are open."""

from __future__ import annotations

import itertools
import os
import shutil
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.tools.replacing import replace_attributes

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from rankwise.tools.auto.shared_calls import SharedCalls
    from rankwise.tools.replacing import Replaced

_KEEPS = {"a", "r+"}
"""Modes of h5py that keep what a file holds."""
_WRITES = {
    "Dataset": ("__setitem__", "resize", "write_direct"),
    "Group": ("__delitem__", "__setitem__", "create_dataset", "create_group", "move"),
    "AttributeManager": ("__delitem__", "__setitem__", "create", "modify"),
}


class HDF5OfRankZero:
    """Which file stands in for which on this rank.

    Args:
        shared: makes calls on rank zero.
        folder: an empty one, for the copies.
    """

    def __init__(self, shared: SharedCalls, folder: Path) -> None:
        self._shared = shared
        self._folder = folder
        self._numbers = itertools.count()
        self._copies: dict[str, str] = {}
        """The copy that stands in for a file that has not been closed, by path; none on rank zero."""
        self._open: dict[int, str] = {}
        """The paths of files that are open for writing, by HDF5's numbers of them."""

    def change(self, module: ModuleType) -> Replaced:
        """Replace what h5py opens, closes and writes; return what it was."""
        return [
            *replace_attributes(module.File, ["__init__"], self._opened),
            *replace_attributes(module.File, ["close"], self._closed),
            *replace_attributes(module.File, ["filename"], self._named),
            *(
                one
                for kind, names in _WRITES.items()
                for one in replace_attributes(getattr(module, kind), names, self._shared.counted)
            ),
        ]

    def _opened(self, open_file: Callable[..., None]) -> Callable[..., None]:
        @wraps(open_file)
        def init(file: Any, name: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
            is_path = isinstance(name, str | bytes | os.PathLike)
            is_for_script = is_path and self._shared.is_for_script()
            if is_for_script and mode == "r":
                open_file(file, self._copies.get(_path(name), name), mode, *args, **kwargs)
            elif is_for_script and self._shared.is_one_file(name, f'h5py.File(mode="{mode}")'):
                self._open_for_all(partial(open_file, file), name, mode, args, kwargs)
                self._open[file.id.id] = _path(name)
                return
            else:
                open_file(file, name, mode, *args, **kwargs)
            # The number of a file that was closed without close().
            self._open.pop(file.id.id, None)

        return init

    def _open_for_all(
        self,
        open_file: Callable[..., None],
        name: str | bytes | os.PathLike[str],
        mode: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        path = _path(name)
        if not self._shared.is_rank_zero and path not in self._copies:
            copy = self._folder / f"{next(self._numbers)}-{Path(path).name}"
            # As it is before rank zero changes it.
            if mode in _KEEPS and Path(path).exists():
                with self._shared.alone():
                    shutil.copyfile(path, copy)
            self._copies[path] = str(copy)
        self._shared.meet("opening a file")
        try:
            self._shared.by_rank_zero(lambda: open_file(name, mode, *args, **kwargs), keeps=True)
            if not self._shared.is_rank_zero:
                with self._shared.alone():
                    open_file(self._copies[path], mode if mode in _KEEPS else "w", *args, **kwargs)
        except BaseException:
            self._forget(path)
            raise

    def _forget(self, path: str) -> None:
        """Read the file itself from now on, unless it is still open."""
        if path not in self._open.values():
            self._copies.pop(path, None)

    def _closed(self, close_file: Callable[..., None]) -> Callable[..., None]:
        @wraps(close_file)
        def close(file: Any) -> None:
            path = self._open.pop(file.id.id, None) if file else None
            close_file(file)
            if path is not None and self._shared.is_for_script():
                self._shared.meet("closing a file")
                self._forget(path)

        return close

    def _named(self, filename: property) -> property:
        """Return the name that the script has opened, not that of the copy."""

        def get(file: Any) -> str:
            own: str = filename.fget(file)  # type: ignore[misc]
            return next((path for path, copy in self._copies.items() if copy == own), own)

        return property(get, doc=filename.__doc__)


def _path(name: Any) -> str:
    return os.path.realpath(os.fsdecode(name))
