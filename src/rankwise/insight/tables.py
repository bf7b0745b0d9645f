# SPDX-License-Identifier: Apache-2.0
"""A table of a page, and the same as text for a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from unicodedata import east_asian_width

MOST_ROWS = 20
"""How many rows a terminal shows of a table."""
_GAP = "  "


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of the page; the first cell of each row names it."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    is_text: bool = False


def text_of(table: Table, more: str) -> str:
    """Return a table in complete lines: its caption, its head, its first rows; ``more`` says how many it leaves out."""
    shown = [table.head, *table.rows[:MOST_ROWS]]
    widths = [max(map(_width, column)) for column in zip(*shown, strict=True)]
    lines = [table.caption] if table.caption else []
    for first, *others in shown:
        cells = [first + " " * (widths[0] - _width(first))]
        for width, cell in zip(widths[1:], others, strict=True):
            space = " " * (width - _width(cell))
            cells.append(cell + space if table.is_text else space + cell)
        lines.append(_GAP.join(cells).rstrip())
    left_out = len(table.rows) - MOST_ROWS
    return "\n".join([*lines, *([more.format(left_out)] if left_out > 0 else []), ""])


def _width(cell: str) -> int:
    """Return how many columns of a terminal a text takes: Chinese characters take two."""
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in cell)
