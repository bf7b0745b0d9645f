# SPDX-License-Identifier: Apache-2.0
"""The structure of sample pages and the look of their charts, compared with what ``report_structure.json`` keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chart_grids import grids_of, palette_of, picture_of_both
from page_structure import differences, structure_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

KEPT = Path(__file__).with_name("report_structure.json")
PAGES = {"report.en": "report", "report.zh": "report", "mesh": "mesh", "checkpoint": "checkpoint"}
"""Each page, and which of the kept ones it must look like."""
SCHEMES = ("light", "dark")
PIXELS = {1280: 2, 390: 4}
"""Of the screen, per pixel of the page, at each width: curves are thin."""


def renew(browser: Browser, folder: Path) -> None:
    """Keep the pages as they are: the colors, and the structure and the grids of each, wide and light."""
    canvas = browser.new_page()
    kept: dict[str, Any] = {"colors": {}, "pages": {}}
    for name, kind in PAGES.items():
        for scheme in reversed(SCHEMES):
            page = _opened(browser, folder, name, 1280, scheme)
            kept["colors"][scheme] = {letter: str(color) for letter, color in palette_of(page).items()}
            charts = {section: grid.rows for section, grid in grids_of(page, canvas).items()}
            kept["pages"][kind] = {"sections": structure_of(page), "charts": charts}
            page.close()
    canvas.close()
    KEPT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def problems_of(browser: Browser, folder: Path) -> list[str]:
    """Return a sentence for each difference from what is kept: wide and narrow, light and dark.

    Of each chart that looks different, a picture of both is put into ``differs`` in the folder.
    """
    kept, canvas = json.loads(KEPT.read_text(encoding="utf-8")), browser.new_page()
    found: list[str] = []
    for name, kind in PAGES.items():
        for width in PIXELS:
            for scheme in SCHEMES:
                page = _opened(browser, folder, name, width, scheme)
                where = f"{name}.html, {width} px, {scheme}"
                found += [f"{where}: {one}" for one in differences(kept["pages"][kind]["sections"], structure_of(page))]
                for letter, color in palette_of(page).items():
                    before = kept["colors"][scheme].get(letter)
                    found += [] if before == str(color) else [f"{where}: color {letter} is {color}; it was {before}"]
                grids = grids_of(page, canvas)
                for chart, rows in kept["pages"][kind]["charts"].items():
                    if chart in grids and (wrong := grids[chart].wrong_cells(rows)):
                        picture = folder / "differs" / f"{name}-{width}-{scheme}-{chart}.png"
                        picture.parent.mkdir(exist_ok=True)
                        picture.write_bytes(picture_of_both(browser, rows, grids[chart]))
                        found.append(f"{where}: chart {chart} {_cells(rows, grids[chart].rows, wrong)}: {picture}")
                page.close()
    canvas.close()
    return found


def _opened(browser: Browser, folder: Path, name: str, width: int, scheme: Any) -> Page:
    size = {"width": width, "height": 900}
    page = browser.new_page(viewport=size, color_scheme=scheme, device_scale_factor=PIXELS[width])
    page.goto((folder / f"{name}.html").as_uri(), wait_until="load")
    return page


def _cells(kept: list[str], found: list[str], wrong: list[int]) -> str:
    if [len(row) for row in kept] != [len(row) for row in found]:
        return f"has {len(found)} rows, not {len(kept)}"
    row, column = divmod(wrong[0], len(kept[0]))
    letters = f"{found[row][column]!r}, not {kept[row][column]!r}"
    return f"differs in {len(wrong)} cells, first in row {row}, column {column}: {letters}"
