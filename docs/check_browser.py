# SPDX-License-Identifier: Apache-2.0
"""Check the built site in a real browser, from the file system: ``check_browser.py site [FOLDER_FOR_PICTURES]``.

Chromium is the system's own: what playwright would download is not used.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import expect, sync_playwright

if TYPE_CHECKING:
    from playwright.sync_api import Browser

WIDTHS = {"phone": 390, "desktop": 1280}
HEIGHT = 900
SEARCHES = {
    "search.html": {"DataLoader": "reference/data-loader.html", "hangs": "failing.html"},
    "zh/search.html": {"分布式训练": "index.html", "rank": "index.html"},
}
"""What is searched for on which page, and a page that is to be found."""
PAGE_WITH_HEADINGS = "security.html"
"""A page with three kinds of headings."""
NOT_FOR_USERS = ("architecture.html", "contributors.html", "releasing.html", "decisions/")
OUTPUT = ".highlight-text pre, .highlight-layers pre"
"""Keeps its columns on a phone, and scrolls: output of programs. Other code continues on the next line."""
WIDE_TABLES = ("benchmarks.html", "frameworks.html")
"""Pages with a table of more columns than a phone has room for: it scrolls, too."""
_CUT = """scrolls => [...document.querySelectorAll("article pre, article .table-wrapper, article td")]
  .filter(one => !(scrolls && one.matches(scrolls)) && one.scrollWidth > one.clientWidth + 1)
  .map(one => one.textContent.trim().slice(0, 60))"""
_SIZE = "one => parseFloat(getComputedStyle(one).fontSize)"
_COLORS = """selector => {
  const {color} = getComputedStyle(document.querySelector(selector));
  return color.match(/[\\d.]+/g).slice(0, 3).map(Number);
}"""


def require(is_so: bool, problem: str) -> None:  # noqa: FBT001 - a condition
    """End the program with the problem, if there is one."""
    if not is_so:
        sys.exit(problem)


def check_widths(browser: Browser, site: Path, pictures: Path | None) -> None:
    """No page scrolls sideways, and nothing on it is cut.

    On a phone, output of programs scrolls by itself, since its columns would be lost; so do the tables of two pages of
    figures. Every other table fits.
    """
    for device, width in WIDTHS.items():
        page = browser.new_page(viewport={"width": width, "height": HEIGHT})
        for path in sorted(site.rglob("*.html")):
            page.goto(path.as_uri())
            needed = page.evaluate("document.documentElement.scrollWidth")
            require(needed <= width, f"{path.relative_to(site)} is {needed} px wide at {width} px")
            may_scroll = f"{OUTPUT}, .table-wrapper" if path.name in WIDE_TABLES else OUTPUT
            cut = page.evaluate(_CUT, may_scroll if device == "phone" else "")
            require(not cut, f"{path.relative_to(site)} is cut at {width} px: {cut}")
            if pictures is not None and path.name == "index.html":
                page.screenshot(path=pictures / f"{device}-{path.parent.name}.png")
        page.close()


def check_headings(browser: Browser, site: Path) -> None:
    """Each kind of heading is smaller than the kind above it, at every width."""
    for device, width in WIDTHS.items():
        page = browser.new_page(viewport={"width": width, "height": HEIGHT})
        page.goto((site / PAGE_WITH_HEADINGS).as_uri())
        sizes = [page.locator(f"article {kind}").first.evaluate(_SIZE) for kind in ("h1", "h2", "h3", "p")]
        require(sizes == sorted(set(sizes), reverse=True), f"headings and text on a {device} have sizes {sizes}")
        page.close()


def check_codes(browser: Browser, site: Path) -> None:
    """On a phone each of two codes has its label; a diff is red and green."""
    page = browser.new_page(viewport={"width": WIDTHS["phone"], "height": HEIGHT})
    for path in (site / "from-ddp.html", site / "zh" / "from-ddp.html"):
        page.goto(path.as_uri())
        labels = page.evaluate(
            """[...document.querySelectorAll("article td:has(pre)")]
            .map(one => getComputedStyle(one, "::before").content)"""
        )
        require(set(labels) == {'"torch.distributed"', '"rankwise"'}, f"{path}: blocks are labelled {set(labels)}")
    page.goto((site / "index.html").as_uri())
    red, green, blue = page.evaluate(_COLORS, ".highlight-diff .gd")
    require(red > max(green, blue), f"what a diff removes is not red: {red}, {green}, {blue}")
    red, green, blue = page.evaluate(_COLORS, ".highlight-diff .gi")
    require(green > max(red, blue), f"what a diff adds is not green: {red}, {green}, {blue}")
    page.close()


def check_tree(browser: Browser, site: Path) -> None:
    """A click on a call of the decision tree leads to its section."""
    page = browser.new_page(viewport={"width": WIDTHS["desktop"], "height": HEIGHT})
    for path in (site / "which-call.html", site / "zh" / "which-call.html"):
        page.goto(path.as_uri())
        calls = page.locator("svg.decision-tree a")
        require(calls.count() > 10, f"{path}: the tree has {calls.count()} links")  # noqa: PLR2004 - it has 17
        calls.last.click()
        heading = page.locator("section:target > h2, span:target + h2").inner_text()
        require(heading.startswith("Kubernetes"), f"{path}: Kubernetes leads to {heading}")
    page.close()


def check_menu(browser: Browser, site: Path) -> None:
    """The index has a logo and cards; menu and search have the pages of users only."""
    page = browser.new_page(viewport={"width": WIDTHS["desktop"], "height": HEIGHT})
    page.goto((site / "index.html").as_uri())
    widths = page.evaluate("[...document.querySelectorAll('.sidebar-logo')].map(one => one.naturalWidth)")
    require(bool(widths) and all(widths), "the logo does not load")
    page.locator("ul.cards li").first.click(position={"x": 5, "y": 5})
    require(page.url.endswith("first-steps.html"), f"the first card leads to {page.url}")
    found = page.evaluate("[...document.querySelectorAll('.sidebar-tree a')].map(one => one.getAttribute('href'))")
    require(not [one for one in found if one.startswith(NOT_FOR_USERS)], f"the menu has {found}")
    page.goto((site / "index.html").as_uri())
    page.fill("input.sidebar-search", "fork server")
    page.press("input.sidebar-search", "Enter")
    expect(page.locator("#search-results h2")).to_be_visible()
    page.wait_for_function("!document.querySelector('#search-progress') || !document.title.includes('...')")
    results = page.locator("ul.search a").evaluate_all("all => all.map(one => one.getAttribute('href'))")
    require(not [one for one in results if one.startswith(NOT_FOR_USERS)], f"the search finds {results}")
    page.close()


def check_copy_buttons(browser: Browser, site: Path) -> None:
    """Each block of code has a button that copies it, in a folded set-up and in a table too."""
    page = browser.new_page(viewport={"width": WIDTHS["desktop"], "height": HEIGHT})
    for name in ("from-ddp.html", "zh/from-ddp.html"):
        page.goto((site / name).as_uri())
        blocks, buttons = page.locator("div.highlight pre"), page.locator("div.highlight button.copybtn")
        expect(buttons.first, f"buttons of {name}").to_be_attached()
        require(buttons.count() == blocks.count(), f"{name}: {buttons.count()} buttons, {blocks.count()} blocks")
    page.close()


def check_search(browser: Browser, site: Path) -> None:
    """A word leads to its page, by the field in the sidebar."""
    page = browser.new_page(viewport={"width": WIDTHS["desktop"], "height": HEIGHT})
    for search, words in SEARCHES.items():
        for word, found in words.items():
            page.goto((site / search).with_name("index.html").as_uri())
            page.fill("input.sidebar-search", word)
            page.press("input.sidebar-search", "Enter")
            result = page.locator(f'ul.search a[href^="{found}"]').first
            expect(result, f"{word} in {search}").to_be_visible()
    page.close()


def check_dark_mode(browser: Browser, site: Path, pictures: Path | None) -> None:
    """The button goes through light and dark, and the background follows."""
    page = browser.new_page(viewport={"width": WIDTHS["desktop"], "height": HEIGHT}, color_scheme="light")
    page.goto((site / "index.html").as_uri())
    seen: set[tuple[str, str]] = set()
    for _ in range(3):
        page.locator(".theme-toggle:visible").first.click()
        theme = page.evaluate("document.body.dataset.theme")
        seen.add((theme, page.evaluate("getComputedStyle(document.body).backgroundColor")))
        if pictures is not None and theme == "dark":
            page.screenshot(path=pictures / "dark.png")
    require({theme for theme, _ in seen} == {"auto", "light", "dark"}, f"the button shows {seen}")
    require(len({colour for _, colour in seen}) > 1, f"the background stays the same: {seen}")
    page.close()


def main(site: Path, pictures: Path | None) -> None:
    """Run every check; the first that fails ends the program."""
    program = shutil.which("chromium")
    if program is None:
        sys.exit("chromium is missing: install it (sudo apt-get install chromium), then try again")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        check_widths(browser, site, pictures)
        check_headings(browser, site)
        check_codes(browser, site)
        check_tree(browser, site)
        check_menu(browser, site)
        check_copy_buttons(browser, site)
        check_search(browser, site)
        check_dark_mode(browser, site, pictures)
        browser.close()
    print("widths, headings, codes, tree, menu, buttons, search and dark mode are as they should be")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]) if len(sys.argv) > 2 else None)  # noqa: PLR2004 - as its usage says
