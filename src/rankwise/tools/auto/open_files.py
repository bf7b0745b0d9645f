# SPDX-License-Identifier: Apache-2.0
"""Files that libraries keep open while the script writes to them: on rank zero; the other ranks write elsewhere."""

from __future__ import annotations

from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.tools.replacing import replace_attributes

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from rankwise.tools.after_import import Change
    from rankwise.tools.auto.shared_calls import SharedCalls
    from rankwise.tools.replacing import Replaced

_CHANGES = {"a", "r+"}
"""Modes of h5py that keep what a file holds."""


def hdf5_of_rank_zero(shared: SharedCalls) -> Change:
    """Return a change of ``h5py``: ranks other than zero keep what they write in memory."""

    def change(module: ModuleType) -> Replaced:
        return [
            *replace_attributes(module.File, ["__init__"], partial(_opened, shared)),
            *replace_attributes(module.File, ["close"], partial(_closed, shared)),
        ]

    return change


def _opened(shared: SharedCalls, open_file: Callable[..., None]) -> Callable[..., None]:
    @wraps(open_file)
    def init(file: Any, name: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as h5py
        if mode == "r" or not shared.counts(name) or not shared.is_one_file(name, f'h5py.File(mode="{mode}")'):
            open_file(file, name, mode, *args, **kwargs)
            return
        error: OSError | None = None
        if not shared.is_rank_zero:
            try:
                # Before rank zero changes the file.
                open_file(
                    file, name, mode if mode in _CHANGES else "w", driver="core", backing_store=False, locking=False
                )
            except OSError as raised:
                error = raised
        shared.meet("opening a file")
        shared.by_rank_zero(lambda: open_file(file, name, mode, *args, **kwargs), keeps=True)
        if error is not None:
            raise error

    return init


def _closed(shared: SharedCalls, close_file: Callable[..., None]) -> Callable[..., None]:
    @wraps(close_file)
    def close(file: Any) -> None:  # noqa: ANN401 - as h5py
        is_written = bool(file) and file.mode != "r"
        name = file.filename if is_written else ""
        close_file(file)
        if is_written and shared.counts(name):
            # Waits for all ranks.
            shared.is_one_file(name, "h5py.File.close")

    return close


def videos_of_rank_zero(shared: SharedCalls, folder: Path) -> Change:
    """Return a change of ``cv2``: ranks other than zero write videos to a temporary folder, ``folder``."""

    def make(real: type[Any]) -> type[Any]:
        # Not a subclass: OpenCV frees objects of one in a way that Python does not expect.
        class VideoWriter:
            """A writer of OpenCV's. Opened and released by: every rank."""

            fourcc = staticmethod(real.fourcc)

            def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as cv2
                self._writer = real()
                self._meets = False
                if args or kwargs:
                    self.open(*args, **kwargs)

            def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as cv2
                return getattr(self._writer, name)

            def open(self, *args: Any, **kwargs: Any) -> bool:  # noqa: ANN401 - as cv2
                """Open a file, and return whether that succeeded."""
                filename, *rest = args or (kwargs.pop("filename"),)
                self._meets = shared.counts(filename) and shared.is_one_file(filename, "cv2.VideoWriter")
                own = str(folder / Path(filename).name) if self._meets and not shared.is_rank_zero else filename
                return bool(self._writer.open(own, *rest, **kwargs))

            def release(self) -> None:
                """Close the file."""
                self._writer.release()
                if self._meets:
                    self._meets = False
                    shared.meet("closing a file")

        return VideoWriter

    return lambda module: replace_attributes(module, ["VideoWriter"], make)
