# SPDX-License-Identifier: Apache-2.0
"""Messages between workers and servers: a head of JSON, then bytes whose sizes the head gives.

Tensors lie in one buffer, this process's own or shared with workers of the same host. Nothing that comes from the
network is run or unpickled. Imported by both ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from rankwise.comm.backends.choose import home_of
from rankwise.comm.backends.mapping import PAGE_BYTES, Mapping
from rankwise.comm.backends.torch_group import TorchGroup
from rankwise.store.wire import as_sent, json_frame
from rankwise.tensors.as_bytes import memory_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.world.facts import World


Head = dict[str, Any]
PURPOSE = "parameter_server"
SECRET_KEY = "rankwise/parameter_server/secret"  # noqa: S105 - where it is kept


@dataclass(slots=True)
class TensorRows:
    """Some rows of a tensor."""

    position: int
    """Which tensor of the body."""
    indices: torch.Tensor
    """[n], int64."""
    values: torch.Tensor
    """[n, ...], of the tensor's dtype; on the CPU, contiguous."""

    def memory(self) -> list[memoryview]:
        """Return where both lie."""
        return [memory_of(part) for part in (self.indices, self.values)]


@dataclass(slots=True)
class ServerMessage:
    """A head, with what follows it."""

    head: Head
    rows: list[TensorRows] = field(default_factory=list[TensorRows])


def packed(
    head: Head, body: TensorBuffer, positions: Sequence[int], rows: Sequence[TensorRows], *, is_shared: bool
) -> list[bytes | memoryview]:
    """Return a message as it goes out, one piece after the other.

    Args:
        head: of the message.
        body: holds the whole tensors.
        positions: which of them are meant.
        rows: of others, which travel in parts.
        is_shared: whether the other end sees the body's memory, so that nothing of it has to travel.
    """
    whole = {"whole": list(positions), "rows": [[one.position, len(one.indices)] for one in rows]}
    pieces = [] if is_shared else body.pieces(positions)
    return as_sent(json_frame(head | whole), [*pieces, *(memory for one in rows for memory in one.memory())])


def receive_buffers(head: Head, body: TensorBuffer, *, is_shared: bool) -> tuple[list[memoryview], list[TensorRows]]:
    """Return the memory that what follows a head is to be read into, in order, and the rows among it."""
    pieces = [] if is_shared else body.pieces(head["whole"])
    rows: list[TensorRows] = []
    for position, count in head["rows"]:
        like = body.views[position]
        one = TensorRows(
            position, torch.empty(count, dtype=torch.int64), torch.empty((count, *like.shape[1:]), dtype=like.dtype)
        )
        rows.append(one)
        pieces += one.memory()
    return pieces, rows


ALIGNMENT_BYTES = 64


def shared_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return how large a mapping has to be to hold one value of each of ``tensors``."""
    return PAGE_BYTES + _starts(tensors)[-1]


def _starts(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return where each value begins, and the end of the last, in bytes."""
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    return starts


class TensorBuffer:
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
        self._bytes = memory_of(memory)
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


def shared_home(exchange: Exchange, world: World) -> str:
    """Return what ranks that can share memory have in common; nothing where this one is not to.

    Args:
        exchange: of all ranks. Gloo between CPU ranks was asked for, or there is a reason.
        world: this rank's.
    """
    if isinstance(exchange, TorchGroup) and world.device == "cpu":
        return ""
    home = home_of(world)
    return "" if home.startswith("!") else home


def create_memory(tensors: Sequence[torch.Tensor]) -> Mapping | None:
    """Return memory for one value of each of ``tensors``, if the machine gives it."""
    try:
        return Mapping.create(shared_bytes(tensors))
    except OSError:
        return None


def open_memory(ticket: str, tensors: Sequence[torch.Tensor]) -> Mapping | None:
    """Return what another process has created for the same tensors, if it can be seen from here.

    Args:
        ticket: of the other's :class:`rankwise.comm.backends.mapping.Mapping`; empty for none.
        tensors: their shapes and dtypes count.
    """
    try:
        return Mapping.open(ticket, shared_bytes(tensors)) if ticket else None
    except OSError:
        return None
