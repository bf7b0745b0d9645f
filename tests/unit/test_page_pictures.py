# SPDX-License-Identifier: Apache-2.0
"""The pictures of pages: docs/page_pictures.py draws them, and a page shows each."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
DRAWING = runpy.run_path(str(DOCS / "page_pictures.py"))


@pytest.mark.parametrize("name", DRAWING["PICTURES"])
def test_a_picture_is_what_is_drawn_and_on_a_page(name: str) -> None:
    kept = (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8")
    assert kept == DRAWING["picture"](name), "run python docs/page_pictures.py"
    pages = [page.name for page in DOCS.glob("*.md") if f"](images/{name}.svg)" in page.read_text(encoding="utf-8")]
    assert len(pages) == 1
