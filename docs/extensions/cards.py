# SPDX-License-Identifier: Apache-2.0
"""Cards: a list below ``<!-- cards -->``, whose items begin with a link each.

The comment leaves it a plain list where the site is not built, as on GitHub.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

MARK = "<!-- cards -->"


def setup(app: Sphinx) -> dict[str, Any]:
    """Give such lists a class, which ``rankwise.css`` styles."""
    app.connect("source-read", mark_cards)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def mark_cards(app: Sphinx, docname: str, source: list[str]) -> None:  # noqa: ARG001 - as Sphinx calls it
    """Put a directive in place of the comment."""
    source[0] = source[0].replace(MARK, "```{rst-class} cards\n```")
