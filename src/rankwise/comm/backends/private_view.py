# SPDX-License-Identifier: Apache-2.0
"""Shared memory that a process may write for itself alone: it reads what others write, until it writes a page itself.

Built on Linux's private mappings: the first write to a page gives this process its own copy of it (copy-on-write).
/proc/self/pagemap tells which pages those are, however they were written. The copy is a page fault, and the kernel
counts those of a process: as long as there are no new ones, nothing has been written.
Source: Documentation/admin-guide/mm/pagemap.rst of Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import resource
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

_ENTRY_BYTES = 8
_KIND_SHIFT = np.uint64(61)
_OWN_IN_MEMORY = 0b100
_OWN_IN_SWAP = 0b010
"""The top bits of an entry: present, swapped out, and whether the page belongs to the file."""
_NONE = np.zeros(0, dtype=np.intp)


class PrivateView:
    """A private mapping of a file, from the start of it."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._memory = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_PRIVATE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def tensor(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that is the memory from byte ``start`` on."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start).view(tuple(shape))

    def part(self, start: int, num_bytes: int) -> ViewPart:
        """Return a part of it, whose writes are followed from now on."""
        return ViewPart(self, start, num_bytes)

    def written_pages(self, start: int, num_bytes: int) -> npt.NDArray[np.intp]:
        """Return the pages of a part that this process has written since :meth:`forget`, counted from byte 0."""
        first = start // mmap.PAGESIZE
        num_pages = -(-(start + num_bytes) // mmap.PAGESIZE) - first
        place = (self._address // mmap.PAGESIZE + first) * _ENTRY_BYTES
        entries = np.frombuffer(os.pread(_pagemap(os.getpid()), num_pages * _ENTRY_BYTES, place), dtype=np.uint64)
        kinds = entries >> _KIND_SHIFT
        return np.flatnonzero((kinds == _OWN_IN_MEMORY) | (kinds == _OWN_IN_SWAP)) + first

    def forget(self, start: int, num_bytes: int) -> None:
        """Drop what this process has written to the pages of a part: they show what the others write again."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        self._memory.madvise(mmap.MADV_DONTNEED, first, start + num_bytes - first)


class ViewPart:
    """A part of a private view, and what this process writes there."""

    def __init__(self, view: PrivateView, start: int, num_bytes: int) -> None:
        self._view = view
        self._start, self._num_bytes = start, num_bytes
        self._num_faults = -1

    def written_pages(self) -> npt.NDArray[np.intp]:
        """Return the pages that this process has written since :meth:`forget`, counted from byte 0 of the view."""
        num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        if num_faults == self._num_faults:
            return _NONE
        found = self._view.written_pages(self._start, self._num_bytes)
        # A page that was written is found again until it is forgotten.
        self._num_faults = -1 if found.size else num_faults
        return found

    def forget(self) -> None:
        """Show what the other processes have written again."""
        self._view.forget(self._start, self._num_bytes)


@cache
def can_see_writes() -> bool:
    """Return whether this system tells which pages of a private mapping were written."""
    with contextlib.suppress(OSError, AttributeError):
        descriptor = os.memfd_create("rankwise", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, 3 * mmap.PAGESIZE)
            view = PrivateView(descriptor, 3 * mmap.PAGESIZE)
        finally:
            os.close(descriptor)
        ones = view.tensor(0, [3 * mmap.PAGESIZE], torch.uint8)
        ones[0].item()
        ones[mmap.PAGESIZE] = 1
        if view.written_pages(0, 3 * mmap.PAGESIZE).tolist() == [1]:
            view.forget(0, 3 * mmap.PAGESIZE)
            return ones[mmap.PAGESIZE].item() == 0
    return False


@cache
def _pagemap(_process: int) -> int:
    """Return a descriptor of the table of this process: one that a forked process inherits shows its parent's."""
    return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
