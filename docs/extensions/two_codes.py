# SPDX-License-Identifier: Apache-2.0
"""Two codes side by side, in tables that pages write as HTML: each block gets the heading of its column.

On a phone the blocks lie one below the other, where ``rankwise.css`` shows these headings.
"""

from __future__ import annotations

import re
from itertools import cycle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

TABLE = re.compile(r"<table>\n<tr>((?:<th>[^<]+</th>)+)</tr>\n.*?</table>", re.DOTALL)


def setup(app: Sphinx) -> dict[str, Any]:
    """Label the blocks of each such table."""
    app.connect("source-read", label_blocks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def label_blocks(app: Sphinx, docname: str, source: list[str]) -> None:  # noqa: ARG001 - as Sphinx calls it
    """Put the label of each block into its cell."""
    source[0] = TABLE.sub(lambda table: labelled(table[0], table[1]), source[0])


def labelled(table: str, head: str) -> str:
    """Return a table whose cells have the texts of its head, in turn."""
    names = cycle(re.findall(r"<th>([^<]+)</th>", head))
    return re.sub(r"<td>", lambda _: f'<td data-code="{next(names)}">', table)
