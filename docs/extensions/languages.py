# SPDX-License-Identifier: Apache-2.0
"""Links between the languages, whose pages Sphinx builds one tree at a time.

On each page one to the same page in the other language, or to the first page of its folder where there is none, or to
that language's first page; and those of Chinese pages to English ones: ``[text](../shard.md)``. An English page without
a Chinese one is an error.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

HERE = Path(__file__).parents[1]
TREE_OF = {"en": HERE, "zh_CN": HERE / "zh"}
FOLDER_OF = {"en": "", "zh_CN": "zh/"}
"""Where each language's pages lie in the site."""
NAME_OF = {"en": "English", "zh_CN": "中文"}
ENGLISH_ONLY = {"architecture.md", "changelog.md", "contributors.md", "decisions", "reference", "releasing.md"}
"""Pages for contributors, and those made from docstrings."""


def untranslated() -> list[str]:
    """Return the English pages without a Chinese one."""
    pages = (path.relative_to(HERE) for path in HERE.rglob("*.md"))
    translated = (page for page in pages if page.parts[0] not in {*ENGLISH_ONLY, "zh"})
    return sorted(page.as_posix() for page in translated if not (TREE_OF["zh_CN"] / page).exists())


def setup(app: Sphinx) -> dict[str, Any]:
    """Give the templates ``other_language``, and let pages lead out of their tree."""
    if missing := untranslated():
        raise FileNotFoundError(f"docs/zh has no {', '.join(missing)}: translate each page")
    app.connect("source-read", lead_to_english)
    app.connect("html-page-context", add_link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def lead_to_english(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make a link of HTML of each to an English page: of a Markdown link Sphinx would ask for a page of this tree."""
    if app.config.language == "zh_CN":
        up = "../" * (docname.count("/") + 1)
        link = rf"(?<!!)\[([^\[\]]+)\]\({re.escape(up)}([\w/-]+)\.md(#[^)\s]+)?\)"
        source[0] = re.sub(link, rf'<a href="{up}\2.html\3">\1</a>', source[0])


def add_link(
    app: Sphinx,
    pagename: str,
    templatename: str,  # noqa: ARG001 - the same for all
    context: dict[str, Any],
    doctree: nodes.document | None,  # noqa: ARG001 - not looked at
) -> None:
    """Put the other language's name and the address of its page into what a page is made of."""
    own = app.config.language
    (other,) = TREE_OF.keys() - {own}
    nearest = (pagename, PurePosixPath(pagename).with_name("index").as_posix(), "index")
    page = next(one for one in nearest if (TREE_OF[other] / f"{one}.md").exists())
    up = "../" * ((FOLDER_OF[own] + pagename).count("/"))
    context["other_language"] = {"name": NAME_OF[other], "address": f"{up}{FOLDER_OF[other]}{page}.html"}
