# SPDX-License-Identifier: Apache-2.0
"""What is said when ranks call different collectives: the words of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from rankwise.errors import CollectiveMismatch, fold_values, rank_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXT_BYTES = 512


class Gathers(Protocol):
    """What carries small tensors between the ranks."""

    rank: int

    def all_gather(self, tensor: torch.Tensor, *, what: str) -> torch.Tensor:
        """Return the tensors of all ranks in rank order."""
        ...


def gather_texts(exchange: Gathers, text: str, *, what: str) -> list[str]:
    """Return the text of every rank, cut to ``TEXT_BYTES``.

    Called by: every rank.
    """
    return unpacked(exchange.all_gather(packed(text), what=what))


def packed(text: str) -> torch.Tensor:
    """Return a text as [TEXT_BYTES] bytes."""
    return torch.frombuffer(bytearray(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8)


def unpacked(rows: torch.Tensor) -> list[str]:
    """Return the texts of [number, TEXT_BYTES]."""
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


def calls_differ(rank: int, world_size: int, ranks: Sequence[int], texts: Sequence[str]) -> CollectiveMismatch:
    """Return the error for ranks that called different things; ``texts`` are the words of ``ranks``."""
    return CollectiveMismatch(
        "Ranks called different collectives, or one with different shapes or dtypes.",
        where=f"reported on {rank_prefix(rank, world_size)}",
        evidence=fold_values(dict(zip(ranks, texts, strict=True))),
        do="call the same on every rank; all_gather_object() takes values that differ in type and size",
    )
