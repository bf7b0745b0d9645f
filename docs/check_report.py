# SPDX-License-Identifier: Apache-2.0
"""Check a report in a real browser: ``check_report.py FOLDER``, which ``sample_report.py`` has filled.

Pages are also compared with what ``report_structure.json`` keeps of them; ``--renew`` writes it again, from the pages
as they are. Chromium is the system's own: what playwright would download is not used.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accessibility
import report_look
from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

OPENS_WITHIN_SECONDS = 2.0
CHARTS = {"parts": "rect", "steps": "polyline", "heat": "rect", "values-loss": "polyline", "memory": "polyline"}
WIDTHS = (390, 1280)
LEAST_TEXT = 9.0
"""The size of text in a chart, in CSS pixels."""
NUM_KEY_NUMBERS = 4
_SMALLEST = """() => Math.min(...[...document.querySelectorAll("svg text")].map(text => {
  const svg = text.ownerSVGElement, scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  return parseFloat(getComputedStyle(text).fontSize) * scale;
}))"""
_OUTSIDE = """() => [...document.querySelectorAll("svg text")].filter(text => {
  const {x, width} = text.getBBox(), whole = text.ownerSVGElement.viewBox.baseVal.width;
  return x < 0 || x + width > whole + 1;
}).map(text => text.textContent)"""
_CUT = """() => {
  document.querySelectorAll("details").forEach(one => one.open = true);
  return [...document.querySelectorAll(".wide")].filter(one => one.scrollWidth > one.clientWidth)
    .map(one => one.closest("section").id);
}"""
SAYS = {
    "en": "all wait for rank {slow}, which waits for its data",
    "zh": "所有 rank 都在等待 rank {slow}，它在等待自己的数据",
}


def require(is_so: bool, problem: str) -> None:  # noqa: FBT001 - a condition
    """End the program with the problem, if there is one."""
    if not is_so:
        sys.exit(problem)


def opened(browser: Browser, path: Path, width: int = 1280) -> tuple[Page, list[str], float]:
    """Return the page, everything that it fetched, and how long it took to open."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url))
    page.on("pageerror", lambda error: sys.exit(f"{path}: {error}"))
    began = time.monotonic()
    page.goto(path.as_uri(), wait_until="load")
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page, fetched, time.monotonic() - began


def check_charts(page: Page) -> None:
    """Every chart has marks that can be seen, a label, and a table behind it that the keyboard opens."""
    for name, mark in CHARTS.items():
        chart = page.locator(f"section#{name} svg")
        require(bool(chart.get_attribute("aria-label")), f"the chart {name} has no label")
        box = chart.locator(mark).first.bounding_box()
        require(box is not None and box["width"] > 1 and box["height"] > 1, f"the chart {name} shows nothing")
        fill = chart.locator(mark).first.evaluate("e => getComputedStyle(e)[e.tagName === 'rect' ? 'fill' : 'stroke']")
        require(fill not in {"none", "rgb(0, 0, 0)"}, f"the chart {name} has no colors")
        summary = page.locator(f"section#{name} summary")
        summary.focus()
        page.keyboard.press("Enter")
        require(page.locator(f"section#{name} table").is_visible(), f"Enter does not open the table of {name}")


def check_numbers(page: Page, numbers: dict[str, Any]) -> None:
    """The table of parts shows the means that were recorded."""
    head = page.locator("section#parts thead th").all_inner_texts()
    waiting = head.index("waiting for the slowest rank")
    data = head.index("data")
    for rank, row in enumerate(page.locator("section#parts tbody tr").all()):
        cells = row.locator("th, td").all_inner_texts()
        for column, recorded in ((waiting, numbers["means"]["waiting"][rank]), (data, numbers["means"]["data"][rank])):
            shown = seconds_of(cells[column])
            require(abs(shown - recorded) <= 0.006 * recorded + 1e-8, f"{head[column]}: {cells[column]}, {recorded}")


def seconds_of(words: str) -> float:
    """Return a duration as the page shows it."""
    value, unit = words.split()
    return float(value) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]


def check_legible(page: Page, name: str, width: int) -> None:
    """Texts of charts are large enough and within their chart; on a wide screen no table is cut."""
    smallest = page.evaluate(_SMALLEST)
    require(smallest >= LEAST_TEXT, f"{name} has text of {smallest:.1f} px at {width} px")
    outside = page.evaluate(_OUTSIDE)
    require(not outside, f"{name} has texts outside of their charts at {width} px: {outside}")
    cut = page.evaluate(_CUT) if width == max(WIDTHS) else []
    require(not cut, f"{name} cuts tables at {width} px, in {cut}")


def check_pages(browser: Browser, folder: Path) -> None:
    """Every page has its structure and look, and what readers without eyes or mouse need."""
    problems = report_look.problems_of(browser, folder)
    again = f"where this is meant: python docs/check_report.py {folder} --renew"
    require(not problems, "\n".join([*problems, again]))
    for name in report_look.PAGES:
        page, _, _ = opened(browser, folder / f"{name}.html")
        problems = accessibility.problems_of(page)
        require(not problems, f"{name}.html: {'; '.join(problems)}")
        page.close()
        for width in WIDTHS:
            page, _, _ = opened(browser, folder / f"{name}.html", width)
            check_legible(page, f"{name}.html", width)
            page.close()


def main(folder: Path, *, is_renewed: bool) -> None:
    """Check the page in both languages, light and dark, wide and narrow, and printed."""
    numbers = json.loads((folder / "numbers.json").read_text())
    chromium = shutil.which("chromium")
    require(chromium is not None, "chromium is missing: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        if is_renewed:
            report_look.renew(browser, folder)
        for language, says in SAYS.items():
            path = folder / f"report.{language}.html"
            page, fetched, seconds = opened(browser, path)
            require(fetched == [path.as_uri()], f"the page fetches {fetched[1:]}")
            require(seconds < OPENS_WITHIN_SECONDS, f"the page opens in {seconds:.1f} s")
            print(f"{path.name}: {path.stat().st_size / 2**20:.2f} MiB, opens in {seconds:.2f} s")
            headline = page.locator(".headline").inner_text()
            require(says.format(slow=numbers["slow"]) in headline, headline)
            require(page.locator(".numbers dd").count() == NUM_KEY_NUMBERS, "there are not four key numbers")
            check_charts(page)
            if language == "en":
                check_numbers(page, numbers)
            page.emulate_media(color_scheme="dark")
            back = page.evaluate("getComputedStyle(document.body).backgroundColor")
            require(back == "rgb(13, 17, 23)", f"a dark screen has a background of {back}")
            page.pdf(path=folder / f"report.{language}.pdf")
            page.close()
            for width in WIDTHS:
                page, _, _ = opened(browser, path, width)
                needed = page.evaluate("document.documentElement.scrollWidth")
                require(needed <= width, f"{path.name} is {needed} px wide at {width} px")
                page.screenshot(path=folder / f"{language}-{width}.png", full_page=True)
                page.close()
        check_pages(browser, folder)
        browser.close()


main(Path(sys.argv[1]).resolve(), is_renewed="--renew" in sys.argv[2:])
