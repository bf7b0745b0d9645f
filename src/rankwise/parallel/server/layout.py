# SPDX-License-Identifier: Apache-2.0
"""Which server keeps which parameters, and how their values lie in memory when they travel. Sends nothing."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from rankwise.exchange.mapping import PAGE_BYTES, Mapping

if TYPE_CHECKING:
    from collections.abc import Sequence

ALIGNMENT_BYTES = 64


def spread(sizes_bytes: Sequence[int], num_servers: int) -> list[list[int]]:
    """Return the numbers of the parameters that each server keeps: whole ones, about equally many bytes each.

    The largest go first, each to the server with the least; one that is larger than all others together is not split.

    Args:
        sizes_bytes: of the parameters, by number.
        num_servers: at least 1.
    """
    loads = [0] * num_servers
    kept: list[list[int]] = [[] for _ in loads]
    for number in sorted(range(len(sizes_bytes)), key=lambda one: (-sizes_bytes[one], one)):
        server = loads.index(min(loads))
        loads[server] += sizes_bytes[number]
        kept[server].append(number)
    return [sorted(numbers) for numbers in kept]


def dense(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it lies in memory as a whole: the momentum of sparse gradients does not."""
    return value.to_dense() if value.is_sparse else value


def shared_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return how large a mapping has to be to hold one value of each of ``tensors``."""
    return PAGE_BYTES + _starts(tensors)[-1]


def _starts(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return where each value begins, and the end of the last, in bytes."""
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    return starts


class Body:
    """Memory for one value of each of some tensors, on the CPU, as it travels or as two processes share it."""

    def __init__(self, tensors: Sequence[torch.Tensor], mapping: Mapping | None = None) -> None:
        """Take memory; the system gives it page by page as it is written.

        Args:
            tensors: of these shapes and dtypes.
            mapping: the memory, of as many bytes as :func:`shared_bytes` says; ``None`` takes some of its own.
        """
        self._starts = _starts(tensors)
        self._ends = [start + tensor.nbytes for start, tensor in zip(self._starts, tensors, strict=False)]
        size = [self._starts[-1]]
        memory = (
            torch.empty(size, dtype=torch.uint8) if mapping is None else mapping.tensor(PAGE_BYTES, size, torch.uint8)
        )
        self._bytes = memory.numpy().data
        self.views = [
            memory[start:end].view(tensor.dtype).view(tensor.shape)
            for start, end, tensor in zip(self._starts, self._ends, tensors, strict=False)
        ]
        """By position, each contiguous."""

    def pieces(self, positions: Sequence[int]) -> list[memoryview]:
        """Return the memory of some of the tensors, in order, neighbours in one piece.

        Args:
            positions: ascending.
        """
        if not positions:
            return []
        breaks = [0, *(at for at, (a, b) in enumerate(pairwise(positions), 1) if b != a + 1), len(positions)]
        ranges = [(positions[first], positions[last - 1]) for first, last in pairwise(breaks)]
        return [self._bytes[self._starts[first] : self._ends[last]] for first, last in ranges]
