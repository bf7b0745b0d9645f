# SPDX-License-Identifier: Apache-2.0
"""What workers and servers say to each other: a head of JSON, then bytes whose sizes the head tells.

Nothing that comes from the network is run or unpickled. Imported by both ends.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rankwise.exchange.bytes_of import bytes_of
from rankwise.store.wire import NUMBER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.parallel.server.layout import Body

Head = dict[str, Any]
PURPOSE = "parameter_server"
JOINED_BYTES = 2**16
"""Up to which size pieces go out together: each on its own would be a packet."""
SECRET_KEY = "rankwise/parameter_server/secret"  # noqa: S105 - where it is kept


@dataclass(slots=True)
class Rows:
    """Some rows of a tensor."""

    position: int
    """Which tensor of the body."""
    indices: torch.Tensor
    """[n], int64."""
    values: torch.Tensor
    """[n, ...], of the tensor's dtype; on the CPU, contiguous."""


@dataclass(slots=True)
class Message:
    """A head, with what follows it."""

    head: Head
    rows: list[Rows] = field(default_factory=list[Rows])


def framed(head: Head) -> bytes:
    """Return a head as it travels."""
    text = json.dumps(head).encode()
    return NUMBER.pack(len(text)) + text


def packed(
    head: Head, body: Body, positions: Sequence[int], rows: Sequence[Rows], *, is_shared: bool
) -> tuple[bytes, list[memoryview]]:
    """Return a message as it travels.

    Args:
        head: what is said.
        body: holds the whole tensors.
        positions: which of them are meant.
        rows: of others, which travel in parts.
        is_shared: whether the other end sees the body's memory, so that nothing of it has to travel.
    """
    whole = {"whole": list(positions), "rows": [[one.position, len(one.indices)] for one in rows]}
    parts = [bytes_of(part).numpy().data for one in rows for part in (one.indices, one.values)]
    pieces = [] if is_shared else body.pieces(positions)
    return framed(head | whole), [*pieces, *(part for part in parts if part.nbytes)]


def as_sent(head: bytes, pieces: Sequence[memoryview]) -> Sequence[bytes | memoryview]:
    """Return a message as it goes out, one piece after the other."""
    if sum(piece.nbytes for piece in pieces) <= JOINED_BYTES:
        return [b"".join([head, *pieces])]
    return [head, *pieces]


def places(head: Head, body: Body, *, is_shared: bool) -> tuple[list[memoryview], list[Rows]]:
    """Return the memory that what follows a head is to be read into, in order, and the rows among it."""
    pieces = [] if is_shared else body.pieces(head["whole"])
    rows: list[Rows] = []
    for position, count in head["rows"]:
        like = body.views[position]
        one = Rows(
            position, torch.empty(count, dtype=torch.int64), torch.empty((count, *like.shape[1:]), dtype=like.dtype)
        )
        rows.append(one)
        pieces += [view for part in (one.indices, one.values) if (view := bytes_of(part).numpy().data).nbytes]
    return pieces, rows
