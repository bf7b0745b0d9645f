# SPDX-License-Identifier: Apache-2.0
"""Memory that processes of one host share: without a name, so that nothing can be left behind.

One process creates it (memfd_create) and sends the others its process number and descriptor; they open it under /proc.
It exists as long as one of them does. It is opened in every rank of a host, or in none of the world.

A private view reads what others write, until this process writes a page itself: Linux then gives it a copy of its own
(copy-on-write). /proc/self/pagemap tells which pages those are, however they were written. The copy is a page fault,
and the kernel counts those of a process: as long as there are no new ones, nothing has been written.
Source: Documentation/admin-guide/mm/pagemap.rst of Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import resource
import secrets
from functools import cache
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from rankwise.comm.backends.protocol import gather_texts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from rankwise.comm.backends.protocol import Exchange


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


LINE_BYTES = 64
"""A cache line: data written by two processes must not share one."""
WORD_BYTES = 8
PAGE_BYTES = mmap.PAGESIZE
_TOKEN_BYTES = 16
_WHAT = "opening shared memory"


class Mapping:
    """One piece of shared memory. Its first page holds a token that distinguishes it from any other."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor: int | None = descriptor
        self._memory = mmap.mmap(descriptor, num_bytes)
        self.words = memoryview(self._memory).cast("q")
        """All of it as 64-bit integers."""
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.private = PrivateView(descriptor, num_bytes) if can_see_writes() else None
        """The same memory, where this process can write without the others seeing it."""

    @classmethod
    def create(cls, num_bytes: int) -> Self:
        """Create memory of ``num_bytes``, all zero. It takes up no memory before it is reserved or written."""
        descriptor = os.memfd_create("rankwise", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, num_bytes)
            created = cls(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        created._memory[:_TOKEN_BYTES] = secrets.token_bytes(_TOKEN_BYTES)
        return created

    @classmethod
    def open(cls, ticket: str, num_bytes: int) -> Self:
        """Open what another process has created with ``num_bytes``, from its :attr:`ticket`.

        Raises:
            OSError: the other process is not visible from here, or the file found belongs to another one.
        """
        process, number, token = ticket.split(":")
        # Numbers only: a text from the network must not lead to another file.
        descriptor = os.open(f"/proc/{int(process)}/fd/{int(number)}", os.O_RDWR | os.O_CLOEXEC)
        if os.pread(descriptor, _TOKEN_BYTES, 0).hex() != token:
            os.close(descriptor)
            message = f"/proc/{process}/fd/{number} belongs to another process"
            raise OSError(message)
        return cls(descriptor, num_bytes)

    @property
    def ticket(self) -> str:
        """What another process of this host needs to open it, until :meth:`settle`."""
        return f"{os.getpid()}:{self._descriptor}:{self._memory[:_TOKEN_BYTES].hex()}"

    def reserve(self, start: int, num_bytes: int) -> None:
        """Allocate physical memory for a part of it: by the process that will write there, for locality.

        Raises:
            OSError: there is not enough. Without this, the first write would end the process.
        """
        if self._descriptor is not None and num_bytes:
            os.posix_fallocate(self._descriptor, start, num_bytes)

    def settle(self) -> None:
        """Close the descriptor: no other process can open it from now on. mmap keeps one of its own."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def tensor(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that is the memory from byte ``start`` on."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start).view(tuple(shape))

    def bytes_at(self, start: int, num_bytes: int) -> memoryview:
        """Return a part of it as bytes."""
        return memoryview(self._memory)[start : start + num_bytes]


def rounded_up(num_bytes: int, unit_bytes: int) -> int:
    """Return the smallest multiple of ``unit_bytes`` that is not less."""
    return -(-num_bytes // unit_bytes) * unit_bytes


def open_together(
    exchange: Exchange, num_bytes: int, own_parts: Sequence[tuple[int, int]], first: int
) -> tuple[Mapping | None, dict[int, str]]:
    """Open one piece of memory per host, created by its rank ``first``; the same ``num_bytes`` on every rank of a host.

    Called by: every rank of ``exchange``. ``own_parts`` are starts and lengths of the parts that mostly this rank
    writes.

    Returns:
        The memory, or ``None`` on every rank, with the reasons of the ranks that could not open it.
    """
    mapping, reason, ticket = None, "", ""
    if exchange.rank == first:
        try:
            mapping = Mapping.create(num_bytes)
            ticket = mapping.ticket
        except OSError as error:
            reason = str(error)
    ticket = gather_texts(exchange, ticket, what=_WHAT)[first]
    if ticket:
        try:
            if mapping is None:
                mapping = Mapping.open(ticket, num_bytes)
            for start, length in own_parts:
                mapping.reserve(start, length)
        except OSError as error:
            reason = str(error)
    texts = gather_texts(exchange, reason, what=_WHAT)
    if mapping is not None:
        mapping.settle()
    reasons = {rank: text for rank, text in enumerate(texts) if text}
    return (None if reasons else mapping), reasons
