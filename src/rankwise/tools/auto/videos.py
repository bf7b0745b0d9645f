# SPDX-License-Identifier: Apache-2.0
"""Videos that OpenCV writes: by rank zero; the other ranks write to a temporary folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.tools.replacing import replace_attributes

if TYPE_CHECKING:
    from rankwise.tools.after_import import Change
    from rankwise.tools.auto.shared_calls import SharedCalls


def videos_of_rank_zero(shared: SharedCalls, folder: Path) -> Change:
    """Return a change of ``cv2``: ranks other than zero write videos to a temporary folder, ``folder``."""

    def make(real: type[Any]) -> type[Any]:
        of_rank = {"make_real": real, "shared": shared, "folder": folder, "fourcc": staticmethod(real.fourcc)}
        return type("VideoWriter", (_VideoOfRankZero,), of_rank)

    return lambda module: replace_attributes(module, ["VideoWriter"], make)


class _VideoOfRankZero:
    """A writer of OpenCV's. Opened and released by: every rank.

    Not a subclass of OpenCV's, which frees objects of one in a way that Python does not expect.
    """

    make_real: type[Any]
    shared: SharedCalls
    folder: Path

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._writer = self.make_real()
        self._meets = False
        if args or kwargs:
            self.open(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def open(self, *args: Any, **kwargs: Any) -> bool:
        """Open a file, and return whether that succeeded on rank zero."""
        filename, *rest = args or (kwargs.pop("filename"),)
        if not self.shared.counts(filename) or not self.shared.is_one_file(filename, "cv2.VideoWriter"):
            return bool(self._writer.open(filename, *rest, **kwargs))
        self._meets = bool(self.shared.by_rank_zero(lambda: self._writer.open(filename, *rest, **kwargs)))
        if self._meets and not self.shared.is_rank_zero:
            self._writer.open(str(self.folder / Path(filename).name), *rest, **kwargs)
        return self._meets

    def write(self, image: Any) -> None:
        """Write a frame."""
        self.shared.note_change()
        self._writer.write(image)

    def release(self) -> None:
        """Close the file."""
        self._writer.release()
        if self._meets:
            self._meets = False
            self.shared.meet("closing a file")
