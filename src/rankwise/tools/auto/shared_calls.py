# SPDX-License-Identifier: Apache-2.0
"""A call that changes files, made by rank zero for all: whose call it is, whether all name one file, and its result."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
import zlib
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.comm.backends.protocol import NOTE_BYTES
from rankwise.comm.collectives.objects import broadcast_object
from rankwise.comm.session import current_or_none
from rankwise.errors import ConfigurationError, fold_values
from rankwise.health.call_site import user_call_site
from rankwise.health.call_site import words as words_of
from rankwise.tools.auto.caller import calling_module

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rankwise.comm.backends.protocol import Exchange

_TEMPORARY = ("tempfile.mkstemp", "tempfile.mkdtemp")
"""Audit events of Python."""
_DEVICES = ("/dev/", "/proc/", "/sys/")
_LOCKS = (".lock", ".lck")
_CHECKSUM_BYTES = 4
_FOR_THEMSELVES = {"torch", "rankwise", "wandb"}
"""Packages whose own files belong to each rank."""


class SharedCalls:
    """Makes calls on rank zero alone, from the start of the script to its end."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._process = os.getpid()
        self._is_inside = False
        self._num_changes = 0
        self._collector: int | None = None
        """The thread in which unreachable objects are being deleted, which each rank does at another moment."""
        self._temporary: set[str] = set()
        """Files and folders that ``tempfile`` has named."""

    @contextmanager
    def noting_temporary_names(self) -> Generator[None]:
        """Note which files of this rank ``tempfile`` names inside the block."""
        is_over = False

        def look(event: str, args: tuple[object, ...]) -> None:
            # An audit hook stays until the process ends.
            if event in _TEMPORARY and not is_over and isinstance(args[0], str | bytes):
                self._temporary.add(os.path.realpath(os.fsdecode(args[0])))

        sys.addaudithook(look)
        try:
            yield
        finally:
            is_over = True

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank makes the calls."""
        return self._exchange.rank == 0

    @contextmanager
    def alone(self) -> Generator[None]:
        """Change files on this rank only inside the block."""
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before

    @contextmanager
    def noting_collections(self) -> Generator[None]:
        """Note inside the block when Python deletes unreachable objects, with the files that they hold."""

        def note(phase: str, _: dict[str, int]) -> None:
            self._collector = threading.get_ident() if phase == "start" else None

        gc.callbacks.append(note)
        try:
            yield
        finally:
            gc.callbacks.remove(note)

    def counts(self, path: object) -> bool:
        """Return whether a call is the script's, about a file that others see."""
        if not isinstance(path, str | bytes | os.PathLike) or not self.is_for_script():
            return False
        name = os.fsdecode(path)
        if name.startswith(_DEVICES) or name.endswith(_LOCKS):
            return False
        if calling_module() == "__main__":
            return True
        # Libraries keep caches in hidden folders, each process its own.
        inside = os.path.realpath(name).removeprefix(f"{Path.cwd()}/")
        return not any(part.startswith(".") for part in Path(inside).parts)

    def is_for_script(self) -> bool:
        """Return whether a call is the script's, not a package's own, and can be made by all ranks together."""
        return self.can_meet() and calling_module().partition(".")[0] not in _FOR_THEMSELVES

    def can_meet(self) -> bool:
        """Return whether a call is in the process and the thread in which all ranks make the same calls."""
        if self._is_inside or os.getpid() != self._process or current_or_none() is None:
            return False
        if self._collector == threading.get_ident():
            return False
        return threading.current_thread() is threading.main_thread()

    def note_change(self) -> None:
        """Count a change that the script makes without another call of this class."""
        self._num_changes += 1

    def counted(self, write: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts as a change, and is made by every rank."""

        @wraps(write)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.note_change()
            return write(*args, **kwargs)

        return call

    def is_one_file(self, path: Any, words: str, folder: int | None = None) -> bool:
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

    def by_rank_zero(self, action: Callable[[], Any], *, keeps: bool = False) -> Any:
        """Return what an action returns on rank zero, or raise what it raises there. Called by: every rank."""
        result, error = None, None
        if self.is_rank_zero:
            try:
                with self.alone():
                    result = action()
            except Exception as raised:  # noqa: BLE001 - raised again, on every rank
                error = raised
        told, error_of_zero = broadcast_object((None if keeps else result, error))
        if error is not None:
            raise error
        if error_of_zero is not None:
            raise error_of_zero
        return result if self.is_rank_zero else told

    def written_once(self, position: int, keywords: tuple[str, ...], write: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that writes a file, so that rank zero calls it for all.

        Args:
            position: of the path among its arguments.
            keywords: names of the same argument.
            write: the function.
        """

        @wraps(write)
        def call(*args: Any, **kwargs: Any) -> Any:
            named = (kwargs[name] for name in keywords if name in kwargs)
            path = args[position] if len(args) > position else next(named, None)
            if not self.counts(path) or not self.is_one_file(path, write.__name__):
                return write(*args, **kwargs)
            return self.by_rank_zero(lambda: write(*args, **kwargs))

        return call

    def meet(self, what: str) -> None:
        """Wait for all ranks, unless each of them comes here at another moment. Called by: every rank."""
        if self.can_meet():
            self._exchange.barrier(what)

    def num_changes(self) -> int:
        """Return how often the script has changed files."""
        return self._num_changes
