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
    for language, folder in DRAWING["FOLDERS"].items():
        kept = (folder / f"{name}.svg").read_text(encoding="utf-8")
        assert kept == DRAWING["picture"](name, language), "run python docs/page_pictures.py"
        pages = folder.parent.glob("*.md")
        assert sum(f"](images/{name}.svg)" in page.read_text(encoding="utf-8") for page in pages) == 1
