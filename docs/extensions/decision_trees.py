# SPDX-License-Identifier: Apache-2.0
"""Puts the decision tree into its page: links in a picture lead nowhere as long as the page shows it as an image."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from docutils import nodes

if TYPE_CHECKING:
    from sphinx.application import Sphinx

IMAGE = re.compile(r"!\[[^\]]*\]\((decision_tree\.svg)\)")


def setup(app: Sphinx) -> dict[str, Any]:
    """Have the page hold the drawing, and its links lead to the headings."""
    app.connect("source-read", hold_drawing)
    app.connect("doctree-resolved", lead_to_headings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def hold_drawing(app: Sphinx, docname: str, source: list[str]) -> None:  # noqa: ARG001 - as Sphinx calls it
    """Put the file of the image in its place."""
    source[0] = IMAGE.sub(r"```{raw} html\n:file: \1\n```", source[0])


def lead_to_headings(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Replace the names of headings, as GitHub makes them, by the anchors of the site."""
    headings = app.env.metadata[docname].get("myst_slugs", {})
    for drawing in list(doctree.findall(nodes.raw)):
        if 'class="decision-tree"' in drawing.astext():
            text = re.sub(r'href="#([^"]+)"', lambda link: f'href="#{headings[link[1]][1]}"', drawing.astext())
            # What is an image has no links for screen readers.
            text = text.replace('role="img"', 'role="group"', 1)
            drawing.replace_self(nodes.raw("", text, format="html"))
