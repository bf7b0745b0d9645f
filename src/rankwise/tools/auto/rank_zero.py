# SPDX-License-Identifier: Apache-2.0
"""What the script does outside its process, done by rank zero alone: files, folders and output.

Every rank runs the whole script. A call that changes files waits for all ranks; rank zero makes it, and every rank
gets its result: a file is there for all when the call that wrote it has returned. Ranks that name different files, as
temporary ones, each make their own.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import sys
import tempfile
import threading
import zlib
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import torch

from rankwise.comm.backends.protocol import NOTE_BYTES
from rankwise.comm.collectives.objects import broadcast_object
from rankwise.comm.session import current_or_none
from rankwise.errors import ConfigurationError, fold_values
from rankwise.health.call_site import user_call_site
from rankwise.health.call_site import words as words_of
from rankwise.tools.auto.caller import calling_module
from rankwise.tools.replacing import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rankwise.comm.backends.protocol import Exchange

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
_TEMPORARY = ("tempfile.mkstemp", "tempfile.mkdtemp")
"""Audit events of Python."""
_DEVICES = ("/dev/", "/proc/", "/sys/")
_LOCKS = (".lock", ".lck")
_CHECKSUM_BYTES = 4


class RankZeroFiles:
    """Replaces what changes files, from the start of the script to its end."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._process = os.getpid()
        self._is_inside = False
        self._open = builtins.open
        self._num_changes = 0
        self._temporary: set[str] = set()
        """Files and folders that ``tempfile`` has named."""

    @contextmanager
    def replacing(self) -> Generator[None]:
        """Change files on rank zero alone inside the block."""
        is_over = False

        def look(event: str, args: tuple[object, ...]) -> None:
            # An audit hook stays until the process ends.
            if event in _TEMPORARY and not is_over and isinstance(args[0], str | bytes):
                self._temporary.add(os.path.realpath(os.fsdecode(args[0])))

        sys.addaudithook(look)
        try:
            with replaced(
                (os, CHANGES_FILES, self._once),
                *((owner, [name], self._once_saved) for owner, name in _savers()),
                (builtins, ["open"], lambda _: self._opened),
                (io, ["open"], lambda _: self._opened),
                (np, ["savetxt"], _through_open),
            ):
                yield
        finally:
            is_over = True

    def num_changes(self) -> int:
        """Return how often the script has changed files."""
        return self._num_changes

    def _once(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as Python's own
            folder = next((kwargs[name] for name in ("dir_fd", "src_dir_fd") if kwargs.get(name) is not None), None)
            name = function.__name__
            if not self._counts(path):
                return function(path, *args, **kwargs)
            if self._is_one_file(path, name, folder):
                return self._by_rank_zero(lambda: function(path, *args, **kwargs))
            target = args[0] if args else kwargs.get("dst")
            if name not in _MOVES or not self._counts(target) or not self._is_one_file(target, name):
                return function(path, *args, **kwargs)
            # A temporary file that becomes one of the script's.
            self._by_rank_zero(lambda: function(path, *args, **kwargs))
            if self._exchange.rank != 0:
                with self._alone():
                    shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()
            self._exchange.barrier("removing temporary files")
            return None

        return call

    def _once_saved(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as the function
            file = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
            if not self._counts(file) or not self._is_one_file(file, save.__name__):
                save(*args, **kwargs)
            else:
                self._by_rank_zero(lambda: save(*args, **kwargs))

        return call

    def _opened(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as Python's own
        changes = isinstance(mode, str) and not set(mode).isdisjoint("wax+")
        if not changes or "opener" in kwargs or len(args) > 5 or not self._counts(file):  # noqa: PLR2004 - as open()
            return self._open(file, mode, *args, **kwargs)
        if not self._is_one_file(file, f'open(mode="{mode}")'):
            return self._open(file, mode, *args, **kwargs)
        is_zero = self._exchange.rank == 0
        earlier = b""
        if not is_zero and set(mode) & set("a+") and "w" not in mode and Path(file).exists():
            earlier = Path(file).read_bytes()
        self._exchange.barrier("opening a file")
        opened = self._by_rank_zero(lambda: self._open(file, mode, *args, **kwargs), keeps=True)
        if not is_zero:
            opened = self._stand_in(earlier, mode, *args, **kwargs)
        newline = args[3] if len(args) > 3 else kwargs.get("newline")  # noqa: PLR2004 - as open()
        return _closed_together(opened, newline, self._meet)

    def _stand_in(self, earlier: bytes, mode: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as Python's own
        """Return a file with the same content that nobody else sees."""
        handle, path = tempfile.mkstemp()
        os.write(handle, earlier)
        os.close(handle)
        try:
            return self._open(path, mode.replace("x", "w"), *args, **kwargs)
        finally:
            with self._alone():
                Path(path).unlink()

    @contextmanager
    def _alone(self) -> Generator[None]:
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before

    def _counts(self, path: object) -> bool:
        """Return whether a call is the script's, about a file that others see."""
        if self._is_inside or os.getpid() != self._process or current_or_none() is None:
            return False
        if threading.current_thread() is not threading.main_thread() or not isinstance(path, str | bytes | os.PathLike):
            return False
        if calling_module().partition(".")[0] in {"torch", "rankwise"}:
            return False
        name = os.fsdecode(path)
        if name.startswith(_DEVICES) or name.endswith(_LOCKS):
            return False
        inside = os.path.realpath(name).removeprefix(f"{Path.cwd()}/")
        return not any(part.startswith(".") for part in Path(inside).parts)

    def _is_one_file(self, path: Any, words: str, folder: int | None = None) -> bool:  # noqa: ANN401 - any path
        """Return whether all ranks name the same file. Called by: every rank.

        Args:
            path: that this rank names.
            words: the call.
            folder: descriptor of the folder that the path is relative to.

        Raises:
            ConfigurationError: they do not, though it is not a temporary file.
        """
        self._num_changes += 1
        name = os.path.realpath(os.fsdecode(path))
        if folder is not None:
            name = os.path.join(os.path.realpath(f"/proc/self/fd/{folder}"), os.fsdecode(path))  # noqa: PTH118 - as text
        own = name.encode(errors="surrogateescape")
        # Names may be longer than a note.
        head = zlib.crc32(own).to_bytes(_CHECKSUM_BYTES, "little") + bytes([self._is_temporary(name)])
        notes = self._exchange.gather_notes(head + own[: NOTE_BYTES - len(head)], what=words)
        if len(set(notes)) == 1:
            return True
        if all(note[_CHECKSUM_BYTES] for note in notes):
            return False
        names = {rank: note[len(head) :].rstrip(b"\0").decode(errors="replace") for rank, note in enumerate(notes)}
        raise ConfigurationError(
            f"{words} names different files on different ranks, which all run the whole script.",
            where=words_of(user_call_site()),
            evidence=fold_values(names),
            do="put neither the time nor the process nor unseeded numbers into the name; pass it as an argument",
        )

    def _is_temporary(self, name: str) -> bool:
        """Return whether a file is one of this rank's own: it need not have the same name on other ranks."""
        folder = os.path.realpath(tempfile.gettempdir())
        if name.startswith(folder) and not name.startswith(str(Path.cwd())):
            return True
        return any(str(one) in self._temporary for one in (Path(name), *Path(name).parents))

    def _by_rank_zero(self, action: Callable[[], Any], *, keeps: bool = False) -> Any:  # noqa: ANN401 - the action's own
        """Return what an action returns on rank zero, or raise what it raises there. Called by: every rank."""
        result, error = None, None
        if self._exchange.rank == 0:
            try:
                with self._alone():
                    result = action()
            except Exception as raised:  # noqa: BLE001 - raised again, on every rank
                error = raised
        told, error_of_zero = broadcast_object((None if keeps else result, error))
        if error is not None:
            raise error
        if error_of_zero is not None:
            raise error_of_zero
        return result if self._exchange.rank == 0 else told

    def _meet(self) -> None:
        if os.getpid() == self._process and current_or_none() is not None:
            self._exchange.barrier("closing a file")


def _savers() -> list[tuple[object, str]]:
    """Return the functions that take what is saved and a file, and write it by other ways than ``open``."""
    found: list[tuple[object, str]] = [
        (torch, "save"),
        (torch.jit, "save"),
        (torch.jit.RecursiveScriptModule, "save"),
        (torch.export, "save"),
    ]
    # Scripts import functions of it by name, so it is imported before them.
    if find_spec("safetensors") is not None:
        found.append((import_module("safetensors.torch"), "save_file"))
    return found


def _through_open(savetxt: Callable[..., None]) -> Callable[..., None]:
    """Return NumPy's function so that it opens files by the built-in ``open``; it keeps one of its own."""

    def call(fname: Any, X: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, N803 - as NumPy's own
        if not isinstance(fname, str | os.PathLike) or os.fspath(fname).endswith((".gz", ".bz2", ".xz")):
            savetxt(fname, X, *args, **kwargs)
            return
        with open(fname, "w", encoding=kwargs.get("encoding") or "latin1") as file:  # noqa: PTH123 - the replaced one
            savetxt(file, X, *args, **kwargs)

    return call


def _closed_together(file: Any, newline: str | None, meet: Callable[[], None]) -> Any:  # noqa: ANN401 - any file
    """Return the file, so that closing it waits for all ranks."""
    if isinstance(file, io.TextIOWrapper):
        encoding, errors, buffered = file.encoding, file.errors, file.line_buffering
        return _Text(file.detach(), encoding, errors, newline, buffered, meet=meet)
    kinds: dict[type[Any], type[Any]] = {
        io.BufferedWriter: _Writer,
        io.BufferedRandom: _Random,
        io.BufferedReader: _Reader,
    }
    kind = kinds.get(type(file))
    return file if kind is None else kind(file.detach(), meet=meet)


class _ClosedTogether:
    """A file whose ``close`` returns once it is closed on every rank."""

    def __init__(self, *args: Any, meet: Callable[[], None]) -> None:  # noqa: ANN401 - as io's own
        super().__init__(*args)
        self._meet = meet

    def close(self) -> None:
        """Close the file. Called by: every rank."""
        was_closed = self.closed  # type: ignore[attr-defined]
        super().close()  # type: ignore[misc]
        if not was_closed:
            self._meet()


class _Text(_ClosedTogether, io.TextIOWrapper):
    pass


class _Writer(_ClosedTogether, io.BufferedWriter):
    pass


class _Random(_ClosedTogether, io.BufferedRandom):
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
