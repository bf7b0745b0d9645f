# SPDX-License-Identifier: Apache-2.0
"""Weights in files: tensors that are a shared mapping of a safetensors file, so writing to one changes the file.

Knows nothing of models. Imported by place.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rankwise.errors import ConfigurationError
from rankwise.place.plan import bytes_text
from rankwise.tensors.files import CODES, SUFFIX
from rankwise.world.processes import make_temporary_folder, remove_temporary_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

ALIGNMENT_BYTES = 64
"""Alignment of the first tensor of a file, enough for every dtype."""


class OffloadFiles:
    """A new folder within ``parent``, with one file per part of a model. Removed with the object, or at exit.

    Creates ``parent`` if needed; several processes may share it.

    Raises:
        ConfigurationError: the folder is not writable.
    """

    def __init__(self, parent: str | os.PathLike[str]) -> None:
        try:
            Path(parent).mkdir(parents=True, exist_ok=True)
            self.folder = make_temporary_folder("place", Path(parent))
        except OSError as error:
            raise ConfigurationError(
                f"Cannot store weights in {parent}: {error.strerror}.", do="pass offload_folder= a writable folder"
            ) from error
        self._num_files = 0
        self._remove = weakref.finalize(self, _remove, self.folder, os.getpid())

    def tensors(self, kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
        """Return zeros in one new file, all of its space allocated, for a dtype and shape by name.

        Raises:
            ConfigurationError: the disk has no room, or the format does not have a dtype.
        """
        for name, (dtype, _) in kinds.items():
            if dtype not in CODES:
                raise ConfigurationError(
                    f"{name} cannot be stored on disk: safetensors does not support {dtype}.",
                    do="assign it to another device",
                )
        # Widest first, without gaps, so that each tensor is aligned for its dtype.
        names = sorted(kinds, key=lambda name: (-kinds[name][0].itemsize, name))
        header: dict[str, object] = {}
        end = 0
        for name in names:
            dtype, shape = kinds[name]
            begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        start = -(-(8 + len(text)) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        path = self.folder / f"{self._num_files:05d}{SUFFIX}"
        self._num_files += 1
        self._allocate(path, struct.pack("<Q", start - 8) + text.ljust(start - 8), start + end)
        if end == 0:
            return {name: torch.empty(kinds[name][1], dtype=kinds[name][0]) for name in names}
        memory = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=start + end)
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            dtype, shape = kinds[name]
            view = torch.empty(0, dtype=dtype)
            tensors[name] = view.set_(memory, start // dtype.itemsize, shape)  # type: ignore[arg-type]
            start += tensors[name].nbytes
        return tensors

    def _allocate(self, path: Path, head: bytes, size_bytes: int) -> None:
        """Write the head and allocate the rest: writing to a mapping of a full disk would kill the process."""
        try:
            with path.open("xb") as file:
                file.write(head)
                file.flush()
                os.posix_fallocate(file.fileno(), 0, size_bytes)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}:
                raise
            raise ConfigurationError(
                f"{self.folder.parent} has no room for {bytes_text(size_bytes)} of weights: {error.strerror}.",
                evidence=f"free there: {bytes_text(shutil.disk_usage(self.folder).free)}",
                do="pass offload_folder= on a larger disk, or increase the budgets of other devices",
            ) from error

    def remove(self) -> None:
        """Remove the files. Mapped tensors stay usable."""
        self._remove()


def _remove(folder: Path, owner: int) -> None:
    # A process forked while the model existed does not own its files.
    if os.getpid() == owner:
        remove_temporary_folder(folder)
