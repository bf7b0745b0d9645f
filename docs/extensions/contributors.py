# SPDX-License-Identifier: Apache-2.0
"""Keeps the pages for those who change rankwise out of the search: users look for calls and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

PAGES = ("contributors", "architecture", "releasing", "decisions/")


def setup(app: Sphinx) -> dict[str, Any]:
    """Mark these pages, once each is read."""
    app.connect("doctree-read", keep_out_of_search)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def keep_out_of_search(app: Sphinx, doctree: nodes.document) -> None:  # noqa: ARG001 - as Sphinx calls it
    """Say in the page's metadata that the index of the search leaves it out."""
    if app.env.docname.startswith(PAGES):
        app.env.metadata[app.env.docname]["nosearch"] = "true"
