# SPDX-License-Identifier: Apache-2.0
"""The prefix of a rank's output: ``[rank 1/2]`` at the start of every line of its stderr. Imported by ``output``."""

from __future__ import annotations

from rankwise.errors import rank_prefix

LINE_ENDS = (b"\n", b"\r")
_CLEARS_LINE = b"\r\x1b[K"


class LinePrefix:
    """Prefixes each line of one stream with a text."""

    def __init__(self, text: bytes = b"") -> None:
        """Take the text; an empty one leaves the stream unchanged."""
        self._text = text
        self._is_at_line_start = True

    def applied_to(self, data: bytes) -> bytes:
        """Return ``data`` with the prefix at every line's start, and after every carriage return."""
        if not self._text:
            return data
        pieces: list[bytes] = []
        for piece in data.splitlines(keepends=True):
            is_blank_return = piece == b"\r"
            if self._is_at_line_start and not is_blank_return:
                pieces.append(self._text)
            pieces.append(piece)
            self._is_at_line_start = piece.endswith(LINE_ENDS)
        return b"".join(pieces)


def prefix_of(rank: int, world_size: int, *, is_tty: bool) -> LinePrefix:
    """Return the prefix of a rank's stderr.

    Args:
        rank: whose stderr it is.
        world_size: number of ranks.
        is_tty: whether it is shown on a terminal: rank 0's progress bar may be in the line, and redraws itself.
    """
    text = rank_prefix(rank, world_size).encode() + b" "
    return LinePrefix(_CLEARS_LINE + text if is_tty else text)
