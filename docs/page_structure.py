# SPDX-License-Identifier: Apache-2.0
"""The structure of a page of the report, read in a browser: its sections with their charts, legends and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

_READ = """() => [...document.querySelectorAll("section")].map(section => {
  const marks = {};
  for (const mark of section.querySelectorAll("svg rect, svg polyline, svg line, svg text")) {
    const kind = [mark.tagName, ...mark.classList].join(".");
    marks[kind] = (marks[kind] || 0) + 1;
  }
  return {
    section: section.id,
    heading: section.querySelector("h1, h2, h3, h4")?.tagName.toLowerCase(),
    charts: section.querySelectorAll("svg").length,
    marks,
    legend: [...section.querySelectorAll(".legend i")].map(i => i.className),
    tables: [...section.querySelectorAll("table")].map(table =>
      `${table.tBodies[0].rows.length} x ${table.tHead.rows[0].cells.length}`),
  };
})"""


def structure_of(page: Page) -> dict[str, dict[str, Any]]:
    """Return what each section holds, by its name, in order."""
    return {one.pop("section"): one for one in page.evaluate(_READ)}


def differences(kept: dict[str, dict[str, Any]], found: dict[str, dict[str, Any]]) -> list[str]:
    """Return a sentence for each difference between two structures."""
    if list(kept) != list(found):
        return [f"the sections are {', '.join(found)}; they were {', '.join(kept)}"]
    return [
        f"section {name}: {what} is {found[name][what]}; it was {kept[name][what]}"
        for name in kept
        for what in kept[name]
        if kept[name][what] != found[name][what]
    ]
