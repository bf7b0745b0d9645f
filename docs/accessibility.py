# SPDX-License-Identifier: Apache-2.0
"""What a page needs for those who do not see it, or use no mouse, read in a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

_READ = """() => {
  const all = selector => [...document.querySelectorAll(selector)];
  const found = [], levels = all("h1, h2, h3, h4, h5, h6").map(heading => Number(heading.tagName[1]));
  const require = (isSo, problem) => isSo || found.push(problem);
  require(document.documentElement.lang, "html has no lang");
  require(document.title, "the page has no title");
  require(all("main").length === 1, "there is not one main");
  require(levels.filter(level => level === 1).length === 1, "there is not one h1");
  require(levels.every((level, at) => level <= (levels[at - 1] || 0) + 1), `headings skip a level: ${levels}`);
  const ids = all("[id]").map(one => one.id);
  require(new Set(ids).size === ids.length, `two elements have the same id: ${ids}`);
  for (const svg of all("svg"))
    require(svg.getAttribute("role") === "img" && svg.getAttribute("aria-label"),
            `a chart in ${svg.closest("section")?.id} has no role img or no label`);
  for (const table of all("table")) {
    const where = `a table in ${table.closest("section")?.id}`;
    require(table.caption?.textContent.trim(), `${where} has no caption`);
    require([...table.querySelectorAll("th")].every(one => one.scope && one.textContent.trim()),
            `${where} has a heading without text or scope`);
    require([...table.tBodies[0].rows].every(row => row.cells[0].tagName === "TH"),
            `${where} has a row without heading`);
  }
  return found;
}"""
_FOCUS = """() => {
  const style = getComputedStyle(document.activeElement);
  return [document.activeElement.tagName, style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0];
}"""


def problems_of(page: Page) -> list[str]:
    """Return a sentence for each thing that is missing."""
    found: list[str] = page.evaluate(_READ)
    if page.locator("summary").count():
        page.keyboard.press("Tab")
        name, is_visible = page.evaluate(_FOCUS)
        found += [] if name == "SUMMARY" else [f"the Tab key leads to {name} first, not to a table"]
        found += [] if is_visible else ["what has the focus does not look so"]
    return found
