# SPDX-License-Identifier: Apache-2.0
"""What the script does outside its process, done by rank zero alone: files, folders and output.

Every rank runs the whole script. A call that changes files waits for all ranks; rank zero makes it, and every rank
gets its result: a file is there for all when the call that wrote it has returned. Ranks that name different files, as
temporary ones, each make their own.
"""

from __future__ import annotations

import builtins
import bz2
import io
import os
import shutil
import sys
import tarfile
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import torch

from rankwise.tools.replacing import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rankwise.tools.auto.shared_calls import SharedCalls

CHANGES_FILES = (
    "chmod",
    "link",
    "mkdir",
    "remove",
    "rename",
    "replace",
    "rmdir",
    "symlink",
    "truncate",
    "unlink",
    "utime",
)
"""Functions of ``os`` that rank zero calls for all."""
_MOVES = ("rename", "replace")
_NAMES_OF_OPEN = ((builtins, "open"), (io, "open"), (bz2, "_builtin_open"), (tarfile, "bltn_open"))


class RankZeroFiles:
    """Replaces what changes files, from the start of the script to its end."""

    def __init__(self, shared: SharedCalls) -> None:
        self._shared = shared
        self._open = builtins.open

    @contextmanager
    def replacing(self) -> Generator[None]:
        """Change files on rank zero alone inside the block."""
        with (
            self._shared.noting_temporary_names(),
            self._shared.noting_collections(),
            replaced(
                (os, CHANGES_FILES, self._once),
                *(
                    (owner, names, partial(self._shared.written_once, 1, ("f", "filename")))
                    for owner, names in _savers()
                ),
                *((owner, [name], lambda _: self._opened) for owner, name in _NAMES_OF_OPEN),
                (np, ["savetxt"], _through_open),
                (np.memmap, ["flush"], self._flushed_together),
            ),
        ):
            yield

    def _once(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            folder = next((kwargs[name] for name in ("dir_fd", "src_dir_fd") if kwargs.get(name) is not None), None)
            name = function.__name__
            if not self._shared.counts(path):
                return function(path, *args, **kwargs)
            if self._shared.is_one_file(path, name, folder):
                return self._shared.by_rank_zero(lambda: function(path, *args, **kwargs))
            target = args[0] if args else kwargs.get("dst")
            if name not in _MOVES or not self._shared.counts(target) or not self._shared.is_one_file(target, name):
                return function(path, *args, **kwargs)
            # A temporary file that becomes one of the script's.
            self._shared.by_rank_zero(lambda: function(path, *args, **kwargs))
            if not self._shared.is_rank_zero:
                with self._shared.alone():
                    shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()
            self._shared.meet("removing temporary files")
            return None

        return call

    def _opened(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        changes = isinstance(mode, str) and not set(mode).isdisjoint("wax+")
        if not changes or "opener" in kwargs or len(args) > 5 or not self._shared.counts(file):  # noqa: PLR2004 - as open()
            return self._open(file, mode, *args, **kwargs)
        if not self._shared.is_one_file(file, f'open(mode="{mode}")'):
            return self._open(file, mode, *args, **kwargs)
        is_zero = self._shared.is_rank_zero
        earlier = b""
        if not is_zero and set(mode) & set("a+") and "w" not in mode and Path(os.fsdecode(file)).exists():
            earlier = Path(os.fsdecode(file)).read_bytes()
        self._shared.meet("opening a file")
        opened = self._shared.by_rank_zero(lambda: self._open(file, mode, *args, **kwargs), keeps=True)
        if not is_zero:
            opened = self._stand_in(earlier, mode, *args, **kwargs)
        newline = args[3] if len(args) > 3 else kwargs.get("newline")  # noqa: PLR2004 - as open()
        owner = _Owner(file, mode, self._shared.note_change, lambda: self._shared.meet("closing a file"))
        return _closed_together(opened, newline, owner)

    def _flushed_together(self, flush: Callable[[Any], None]) -> Callable[[Any], None]:
        def call(array: Any) -> None:
            flush(array)
            if self._shared.is_for_script():
                self._shared.meet("flushing an array")

        return call

    def _stand_in(self, earlier: bytes, mode: str, *args: Any, **kwargs: Any) -> Any:
        """Return a file with the same content that nobody else sees."""
        handle, path = tempfile.mkstemp(prefix="rankwise-auto-")
        os.write(handle, earlier)
        os.close(handle)
        try:
            return self._open(path, mode.replace("x", "w"), *args, **kwargs)
        finally:
            with self._shared.alone():
                Path(path).unlink()


def _savers() -> list[tuple[object, list[str]]]:
    """Return the functions that take what is saved and a file, and write it by other ways than ``open``."""
    of_modules = ["save", "_save_for_lite_interpreter"]
    found: list[tuple[object, list[str]]] = [
        (torch, ["save"]),
        (torch.jit, ["save"]),
        # Scripted modules have the methods of the first, traced ones those of the second.
        (torch.jit.RecursiveScriptModule, of_modules),
        (torch.jit.ScriptModule, of_modules),
        (torch.jit.ScriptFunction, ["save"]),
        (torch.export, ["save"]),
    ]
    # Scripts import functions of it by name, so it is imported before them.
    if find_spec("safetensors") is not None:
        found += [(import_module(f"safetensors.{of}"), ["save_file"]) for of in ("torch", "numpy")]
    return found


def _through_open(savetxt: Callable[..., None]) -> Callable[..., None]:
    """Return NumPy's function so that it opens files by the built-in ``open``; it keeps one of its own."""

    def call(fname: Any, X: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N803 - as NumPy's own
        if not isinstance(fname, str | os.PathLike) or os.fspath(fname).endswith((".gz", ".bz2", ".xz")):
            savetxt(fname, X, *args, **kwargs)
            return
        with open(fname, "w", encoding=kwargs.get("encoding") or "latin1") as file:  # noqa: PTH123 - the replaced one
            savetxt(file, X, *args, **kwargs)

    return call


@dataclass(frozen=True, slots=True)
class _Owner:
    """What a file is for the script, whatever this rank writes to."""

    name: Any
    mode: str
    note_change: Callable[[], None]
    meet: Callable[[], None]


def _closed_together(file: Any, newline: str | None, owner: _Owner) -> Any:
    """Return the file, so that closing it waits for all ranks."""
    if isinstance(file, io.TextIOWrapper):
        encoding, errors, buffered = file.encoding, file.errors, file.line_buffering
        return _Text(file.detach(), encoding, errors, newline, buffered, owner=owner)
    kinds: dict[type[Any], type[Any]] = {
        io.BufferedWriter: _Writer,
        io.BufferedRandom: _Random,
        io.BufferedReader: _Reader,
    }
    kind = kinds.get(type(file))
    return file if kind is None else kind(file.detach(), owner=owner)


class _ClosedTogether:
    """A file whose ``close`` returns once it is closed on every rank."""

    def __init__(self, *args: Any, owner: _Owner) -> None:
        super().__init__(*args)
        self._owner = owner

    @property
    def name(self) -> Any:
        """The file that rank zero writes."""
        return self._owner.name

    @property
    def mode(self) -> str:
        """How it was opened."""
        return self._owner.mode

    def write(self, data: Any) -> int:
        """Write, and count it as a change of files."""
        self._owner.note_change()
        return super().write(data)  # type: ignore[misc,no-any-return]

    def close(self) -> None:
        """Close the file. Called by: every rank."""
        was_closed = self.closed  # type: ignore[attr-defined]
        super().close()  # type: ignore[misc]
        if not was_closed:
            self._owner.meet()


class _Text(_ClosedTogether, io.TextIOWrapper):
    pass


class _Writer(_ClosedTogether, io.BufferedWriter):
    pass


class _Random(_ClosedTogether, io.BufferedRandom):  # pyright: ignore[reportIncompatibleVariableOverride]
    pass


class _Reader(_ClosedTogether, io.BufferedReader):
    pass


@contextmanager
def output_of_rank_zero(rank: int) -> Generator[None]:
    """Show only what rank zero prints."""
    if rank == 0:
        yield
        return
    before: tuple[TextIO, TextIO] = sys.stdout, sys.stderr
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        sys.stdout = sys.stderr = nowhere
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
