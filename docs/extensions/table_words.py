# SPDX-License-Identifier: Apache-2.0
"""Long names in tables, such as ``torch.multiprocessing.spawn``: the browser may break them between their parts.

So that a table fits on a phone, and no short word is broken in its middle.
"""

from __future__ import annotations

import re
from html import escape, unescape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

LONGEST = 12
"""Up to how many characters a word stays whole."""
TABLE = re.compile(r'<table class="[^"]*\bdocutils\b.*?</table>', re.DOTALL)
CODE = re.compile(r'(?<=<span class="pre">)[^<]+')
TEXT = re.compile(r'(?<!<span class="pre">)(?<=>)[^<]+')
BETWEEN_PARTS = re.compile(
    r"""(?<=[\w)\]][._/,(=:\[|-])(?=["']?[^\W\d]\w\w) | (?<=\w)(?===) | (?<=[a-z]{6})(?=[A-Z][a-z])""", re.VERBOSE
)
"""Behind a sign that joins two names, before a version, and before a capital; no part is shorter than three letters."""


def setup(app: Sphinx) -> dict[str, Any]:
    """Mark where they may break, when a page is written."""
    app.connect("html-page-context", mark_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def mark_page(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: object) -> None:  # noqa: ARG001 - as Sphinx calls it
    """Put the marks into the tables of a page."""
    if "body" in context:
        context["body"] = TABLE.sub(lambda table: marked(table[0]), context["body"])


def marked(table: str) -> str:
    """Return a table with ``<wbr>`` between the parts of its long words."""
    # rankwise.css breaks nothing inside of one such span, such as behind the first hyphen of --nodes.
    table = CODE.sub(lambda code: parted(code[0], '</span><wbr/><span class="pre">'), table)
    return TEXT.sub(lambda text: parted(text[0], "<wbr/>"), table)


def parted(text: str, mark: str) -> str:
    """Return a text of HTML with a mark between the parts of its long words."""
    words = re.split(r"(\s+)", unescape(text))
    parts = [BETWEEN_PARTS.split(word) if len(word) > LONGEST else [word] for word in words]
    return "".join(mark.join(escape(part, quote=False) for part in word) for word in parts)
