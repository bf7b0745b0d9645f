# SPDX-License-Identifier: Apache-2.0
"""Memory that two processes of a host share: tensors are written by one of them and read by the other.

Without a name: the creator passes its process number and descriptor, and the other opens it under /proc.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    Ticket = tuple[int, int, int, bytes]
    """What another process of the host needs to open it: process, descriptor, size in bytes, token."""
    Place = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
    """A tensor in it: its first byte, shape and strides, and dtype."""

_TOKEN_BYTES = 16
_LINE_BYTES = 64


class SharedBytes:
    """A piece of memory, allocated in full: a write never fails."""

    def __init__(self, num_bytes: int, ticket: Ticket | None = None) -> None:
        """Create it, or open the one of a ticket.

        Raises:
            OSError: there is not enough memory, or the ticket is not of this host.
        """
        if ticket is None:
            self._descriptor = os.memfd_create("rankwise-auto", os.MFD_CLOEXEC)
            token = secrets.token_bytes(_TOKEN_BYTES)
            try:
                os.posix_fallocate(self._descriptor, 0, _LINE_BYTES + num_bytes)
                os.pwrite(self._descriptor, token, 0)
            except BaseException:
                self.close()
                raise
            self.ticket: Ticket = (os.getpid(), self._descriptor, num_bytes, token)
        else:
            process, descriptor, num_bytes, token = self.ticket = ticket
            self._descriptor = os.open(f"/proc/{process:d}/fd/{descriptor:d}", os.O_RDWR | os.O_CLOEXEC)
            if os.pread(self._descriptor, _TOKEN_BYTES, 0) != token:
                self.close()
                message = f"/proc/{process}/fd/{descriptor} is other memory"
                raise OSError(message)
        self.num_bytes = num_bytes
        self._memory = mmap.mmap(self._descriptor, _LINE_BYTES + num_bytes)

    def at(self, place: Place) -> torch.Tensor:
        """Return a tensor that is this memory. Each one counts its changes for itself."""
        start, shape, strides, dtype = place
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=_LINE_BYTES + start)
        return flat.as_strided(shape, strides)

    def close(self) -> None:
        """Let no other process open it from now on. It exists as long as a tensor in it does."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()


def lay_out(tensors: Sequence[torch.Tensor]) -> tuple[list[Place], int]:
    """Return a place for each tensor, one after the other and in its own memory format, and the bytes of all."""
    places: list[Place] = []
    end = 0
    for one in tensors:
        places.append((end, tuple(one.shape), dense_strides(one), one.dtype))
        end += -(-one.numel() * one.element_size() // _LINE_BYTES) * _LINE_BYTES
    return places, end


def dense_strides(like: Any) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps whose dims lie in memory as those of ``like`` do."""
    strides, step = [0] * like.dim(), 1
    # A dim of size one may have any stride; of equal ones the last is the innermost.
    for dim in sorted(range(like.dim()), key=lambda one: (like.stride(one), -one)):
        strides[dim] = step
        step *= max(like.shape[dim], 1)
    return tuple(strides)
