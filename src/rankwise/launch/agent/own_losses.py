# SPDX-License-Identifier: Apache-2.0
"""Notices that ranks print the same line with other losses: each is the mean over that rank's own samples."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WATCHED_BYTES = 1 << 16
"""How much of a job's output is compared: what a script prints of its losses, it prints early."""
_NUMBER = re.compile(rb"\d+\.\d+(?:e[-+]?\d+)?")
_LOSS = re.compile(rb"\b(?:loss|accuracy|acc)\b\D{0,12}(" + _NUMBER.pattern + rb")", re.IGNORECASE)
"""A time or a pace in the same line differs between ranks, whatever the loss is."""


class OwnLosses:
    """Compares the first lines of the ranks that have a loss, until two of them differ."""

    def __init__(self) -> None:
        """Begin without lines."""
        self._seen: dict[tuple[int, bytes], dict[int, tuple[bytes, bytes]]] = {}
        """The loss in the first such line of each rank, and the line, by attempt and the line without its numbers."""
        self._num_bytes_left = WATCHED_BYTES

    def notice(self, attempt: int, rank: int, lines: Sequence[bytes]) -> str:
        """Return what to say about new lines of a rank; empty if there is nothing to say, or no more."""
        if self._num_bytes_left <= 0:
            return ""
        self._num_bytes_left -= sum(map(len, lines))
        for line in lines:
            found = _LOSS.search(line)
            if found is None:
                continue
            by_rank = self._seen.setdefault((attempt, _NUMBER.sub(b"#", line)), {})
            other, (loss, first) = next(iter(by_rank.items()), (rank, (found[1], line)))
            if rank not in by_rank and loss != found[1]:
                self._num_bytes_left = 0
                self._seen.clear()
                return _text(other, first, rank, line)
            by_rank.setdefault(rank, (found[1], line))
        return ""


def _text(rank: int, line: bytes, other: int, other_line: bytes) -> str:
    shown, other_shown = (text.decode("utf-8", "replace").strip()[:80] for text in (line, other_line))
    return (
        f"ranks print different losses: {shown!r} on rank {rank}, {other_shown!r} on rank {other}; each is over "
        "that rank's own samples; on every rank, call rankwise.print(rankwise.mean(loss, len(x))) for the mean over "
        "all samples, or rankwise.all_reduce(total) for a sum that the loop adds up"
    )
