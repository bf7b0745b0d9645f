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


def require(is_so: bool, problem: str) -> None:  # noqa: FBT001 - a condition
    """End the program with the problem, if there is one."""
    if not is_so:
        sys.exit(problem)


def check_widths(browser: Browser, site: Path, pictures: Path | None) -> None:
    """No page scrolls sideways as a whole; blocks of code and tables may."""
    for device, width in WIDTHS.items():
        page = browser.new_page(viewport={"width": width, "height": HEIGHT})
        for path in sorted(site.rglob("*.html")):
            page.goto(path.as_uri())
            needed = page.evaluate("document.documentElement.scrollWidth")
            require(needed <= width, f"{path.relative_to(site)} is {needed} px wide at {width} px")
            if pictures is not None and path.name == "index.html":
                page.screenshot(path=pictures / f"{device}-{path.parent.name}.png")
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
        check_copy_buttons(browser, site)
        check_search(browser, site)
        check_dark_mode(browser, site, pictures)
        browser.close()
    print("widths, buttons, search and dark mode are as they should be")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]) if len(sys.argv) > 2 else None)  # noqa: PLR2004 - as its usage says
