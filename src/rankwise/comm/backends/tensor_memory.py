# SPDX-License-Identifier: Apache-2.0
"""The memory of large results, reused when nothing refers to it.

The kernel provides new memory at a fraction of the speed at which tensors are summed: a result of 100 MB would
cost more than the collective itself.
"""

from __future__ import annotations

import sys

import torch

LARGE_BYTES = 2**20
KEPT_BYTES = 2**28
"""How much may be idle."""
MOST_KEPT = 2
"""A loop that replaces its tensor by the result holds one while it creates the next."""


class ResultMemory:
    """Makes tensors; remembers the memory of the last large ones."""

    def __init__(self) -> None:
        self._kept: list[bytearray] = []

    def empty(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor of this shape and of the dtype of ``like``, which is on the CPU."""
        num_bytes = like.element_size()
        for length in shape:
            num_bytes *= length
        if num_bytes < LARGE_BYTES:
            return like.new_empty(shape)
        return torch.frombuffer(self._memory(num_bytes), dtype=like.dtype).view(shape)

    def _memory(self, num_bytes: int) -> bytearray:
        for position in range(len(self._kept)):
            # Two references: the list's, and that of the call. A tensor on it would be a third.
            if len(self._kept[position]) == num_bytes and sys.getrefcount(self._kept[position]) == 2:  # noqa: PLR2004
                self._kept.append(self._kept.pop(position))
                return self._kept[-1]
        memory = bytearray(num_bytes)
        if num_bytes * MOST_KEPT <= KEPT_BYTES:
            self._kept = [*self._kept[1 - MOST_KEPT :], memory]
        return memory
