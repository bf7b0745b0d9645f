# SPDX-License-Identifier: Apache-2.0
"""Short texts that ranks exchange: what each has, or what each has called."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.health import call_site, collective_mismatch
from rankwise.health.collective_mismatch import CollectiveCall

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.errors import CollectiveMismatch

TEXT_BYTES = 512
LONGEST_CALL_BYTES = 2**16
WHAT_EACH_CALLED = "what each rank called"


def gather_texts(exchange: Exchange, text: str, *, what: str) -> list[str]:
    """Return the text of every rank, cut to ``TEXT_BYTES``.

    Called by: every rank.
    """
    rows = exchange.all_gather(row_of(text.encode()[:TEXT_BYTES], TEXT_BYTES), what=what)
    return [one.rstrip(b"\0").decode(errors="replace") for one in bytes_of_rows(rows)]


def row_of(data: bytes, size_bytes: int) -> torch.Tensor:
    """Return bytes as [size_bytes], padded with zeros."""
    return torch.frombuffer(bytearray(data.ljust(size_bytes, b"\0")), dtype=torch.uint8)


def bytes_of_rows(rows: torch.Tensor) -> list[bytes]:
    """Return the bytes of [number, size_bytes]."""
    number, size = rows.shape
    data: bytes = rows.numpy().tobytes()
    return [data[row * size : (row + 1) * size] for row in range(number)]


def calls_differ(
    gather: Callable[[torch.Tensor], torch.Tensor], words: str, hostname: str, ranks: Sequence[int], world_size: int
) -> CollectiveMismatch:
    """Return the error for ranks that called different things.

    Called by: every rank of ``ranks``. ``words`` is what this rank called; ``gather`` returns the tensors of ``ranks``,
    [len(ranks), ...], all of one shape.
    """
    text = "\0".join((hostname, call_site.words(call_site.user_call_site()), words))
    data = torch.frombuffer(bytearray(text.encode()[:LONGEST_CALL_BYTES]), dtype=torch.uint8)
    lengths = gather(torch.tensor([data.numel()])).flatten().tolist()
    padded = data.new_zeros(max(lengths))
    padded[: data.numel()] = data
    calls: dict[int, CollectiveCall] = {}
    for rank, row, length in zip(ranks, gather(padded), lengths, strict=True):
        host, site, called = bytes(row[:length].tolist()).decode(errors="replace").split("\0", 2)
        calls[rank] = CollectiveCall(called, site, host)
    return collective_mismatch.calls_differ(calls, world_size)
