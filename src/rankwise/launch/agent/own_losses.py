# SPDX-License-Identifier: Apache-2.0
"""Notices that ranks print the same line with other losses: each is the mean over that rank's own samples."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WATCHED_BYTES = 1 << 16
"""How much of a job's output is compared: what a script prints of its losses, it prints early."""
_NAME = re.compile(rb"loss|accuracy|\bacc\b", re.IGNORECASE)
_NUMBER = re.compile(rb"\d+\.\d+(?:e[-+]?\d+)?")


class OwnLosses:
    """Compares the first lines of the ranks that have a loss, until two of them differ."""

    def __init__(self) -> None:
        """Begin without lines."""
        self._seen: dict[bytes, dict[int, bytes]] = {}
        """The first such line of each rank, by the line without its numbers."""
        self._num_bytes_left = WATCHED_BYTES

    def notice(self, rank: int, lines: Sequence[bytes]) -> str:
        """Return what to say about new lines of a rank; empty if there is nothing to say, or no more."""
        if self._num_bytes_left <= 0:
            return ""
        self._num_bytes_left -= sum(map(len, lines))
        for line in lines:
            if _NAME.search(line) is None:
                continue
            by_rank = self._seen.setdefault(_NUMBER.sub(b"#", line), {})
            other, first = next(iter(by_rank.items()), (rank, line))
            if rank not in by_rank and first != line:
                self._num_bytes_left = 0
                self._seen.clear()
                return _text(other, first, rank, line)
            by_rank.setdefault(rank, line)
        return ""


def _text(rank: int, line: bytes, other: int, other_line: bytes) -> str:
    shown, other_shown = (text.decode("utf-8", "replace").strip()[:80] for text in (line, other_line))
    return (
        f"ranks print different losses: {shown!r} on rank {rank}, {other_shown!r} on rank {other}; each is the mean "
        "over that rank's own samples; call rankwise.print(rankwise.mean(loss, len(x))) for the mean over all of them"
    )
