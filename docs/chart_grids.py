# SPDX-License-Identifier: Apache-2.0
"""The charts of a page as they look in a browser, reduced to coarse grids: which color dominates each cell.

Colors are named as in the page's style, so a grid is the same on light and dark screens, wide and narrow ones. Text is
hidden before: fonts do not matter. Colors in between, at the edges of marks, count for none.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

COLUMNS = 96
NAMES = {
    ".": "back",
    "-": "line",
    "d": "data",
    "f": "forward",
    "b": "backward",
    "e": "exchange",
    "w": "waiting",
    "o": "optimizer",
    "s": "script",
    "c": "checkpoint",
    "v": "evaluation",
    **{str(shade): f"heat{shade}" for shade in range(8)},
}
"""What each letter of a grid stands for; background and grid lines count as nothing. A capital fills its cell."""
_NOTHING = ".-"
OTHER = "?"
"""A cell that is mostly in colors which are not the style's."""
_SHOWS = 0.02
"""The share of a cell from which on a color shows there; a curve is thin."""
_FILLS = 0.5
_NOISE = 0.2
"""By how much of a cell browsers may differ."""
_BORDERLINE = 0.01
"""The share of a chart's cells in which a thin mark may differ: a curve may run along the border of two cells."""

# Red, green and blue of a color, however it is written.
_RGB = """const rgb = color => {
  const canvas = document.createElement("canvas").getContext("2d");
  canvas.fillStyle = color;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
};"""

_PALETTE = f"""names => {{ {_RGB}
  const probe = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  document.body.append(probe);
  const palette = Object.entries(names).map(([letter, name]) => {{
    probe.style.fill = name.startsWith("heat") ? "" : `var(--${{name}})`;
    probe.setAttribute("class", name);
    return [letter, rgb(getComputedStyle(probe).fill)];
  }});
  probe.remove();
  return Object.fromEntries(palette);
}}"""

_USED = f"""chart => {{ {_RGB}
  const styles = [...chart.querySelectorAll("rect, polyline")].map(mark => [mark, getComputedStyle(mark)]);
  return [...new Set(styles.map(([mark, style]) => mark.tagName === "rect" ? style.fill : style.stroke))].map(rgb);
}}"""

_GRID = """async ({png, palette, columns, rows, width, height}) => {
  const image = new Image();
  image.src = "data:image/png;base64," + png;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.width, image.height];
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const {data} = context.getImageData(0, 0, image.width, image.height);
  const known = Object.entries(palette), met = new Map(), cells = [];
  const letterOf = (red, green, blue) => {
    let best = "?", least = 24;
    for (const [letter, [r, g, b]] of known) {
      const far = Math.hypot(red - r, green - g, blue - b);
      if (far < least) [best, least] = [letter, far];
    }
    return best;
  };
  for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) cells.push({});
  // The last row of pixels may lie only partly within the chart.
  const down = height * image.width / width;
  for (let y = 0; y < Math.floor(down); y++) for (let x = 0; x < image.width; x++) {
    const at = 4 * (y * image.width + x), key = data[at] << 16 | data[at + 1] << 8 | data[at + 2];
    if (!met.has(key)) met.set(key, letterOf(data[at], data[at + 1], data[at + 2]));
    const best = met.get(key);
    const cell = cells[Math.floor(y * rows / down) * columns + Math.floor(x * columns / image.width)];
    cell[best] = (cell[best] || 0) + 1;
  }
  return cells.map(cell => {
    const whole = Object.values(cell).reduce((sum, one) => sum + one, 0);
    return Object.fromEntries(Object.entries(cell).map(([letter, count]) => [letter, count / whole]));
  });
}"""

# Where it is on the page, a chart begins between two pixels of the screen.
_ALIGN = """chart => {
  const {width, height} = chart.getBoundingClientRect();
  chart.style = `position: fixed; left: 0; top: 0; margin: 0; width: ${width}px; max-width: none; z-index: 1;
    background: var(--back)`;
  return {x: 0, y: 0, width, height};
}"""

_PICTURE = """({kept, found, columns, palette, wrong, png}) => {
  const grid = (title, rows) => `<p>${title}</p><div style="display: grid; width: 960px;
    grid-template-columns: repeat(${columns}, 1fr)">` + [...rows.join("")].map((letter, at) => `<i style="height: 20px;
    background: ${palette[letter.toLowerCase()] ? "rgb(" + palette[letter.toLowerCase()] + ")" : "magenta"};
    outline: ${wrong.includes(at) ? "2px solid red; z-index: 1" : "1px solid #8884"}"></i>`).join("") + "</div>";
  document.body.innerHTML = grid("kept", kept) + grid("now", found)
    + `<p>now</p><img style="width: 960px" src="data:image/png;base64,${png}">`;
}"""


@dataclass(frozen=True, slots=True)
class ChartGrid:
    """What a chart looks like."""

    rows: list[str]
    """A letter for each cell."""
    shares: list[dict[str, float]]
    """Of each cell, row by row: the share of each letter."""
    png: str
    palette: dict[str, list[int]]

    def wrong_cells(self, kept: list[str]) -> list[int]:
        """Return the cells that do not look like those kept, by number: all of them if the chart has another size."""
        if [len(row) for row in kept] != [len(row) for row in self.rows]:
            return list(range(len(self.shares)))
        cells = enumerate(zip("".join(kept), self.shares, strict=True))
        wrong = {at: _fills(letter, shares) for at, (letter, shares) in cells if not _is_still(letter, shares)}
        return list(wrong) if any(wrong.values()) or len(wrong) > _BORDERLINE * len(self.shares) else []


def _largest(shares: dict[str, float]) -> tuple[str, float]:
    """Return the mark that covers most of a cell, and its share; unnamed colors count only where they fill the cell."""
    marks = {name: one for name, one in shares.items() if name not in _NOTHING and (name != OTHER or one > _FILLS)}
    return max(marks.items(), key=lambda mark: mark[1], default=(".", 0.0))


def _letter_of(shares: dict[str, float]) -> str:
    letter, share = _largest(shares)
    return "." if share < _SHOWS else letter.upper() if share >= _FILLS else letter


def _is_still(letter: str, shares: dict[str, float]) -> bool:
    """Return whether a cell looks as it did, but for what browsers may differ by."""
    _, largest = _largest(shares)
    if letter == ".":
        return largest < 2 * _SHOWS
    share = shares.get(letter.lower(), 0.0)
    is_as_full = share >= _FILLS - _NOISE if _is_full(letter) else 0.0 < share < _FILLS + _NOISE
    return is_as_full and share >= largest - _NOISE


def _is_full(letter: str) -> bool:
    return letter.isupper() or letter.isdigit() or letter == OTHER


def _fills(letter: str, shares: dict[str, float]) -> bool:
    """Return whether a mark fills a cell, or has filled it."""
    return _is_full(letter) or _largest(shares)[1] >= _FILLS


def palette_of(page: Page) -> dict[str, list[int]]:
    """Return the color of each letter on a page: red, green, blue."""
    return page.evaluate(_PALETTE, NAMES)


def grids_of(page: Page, canvas: Page) -> dict[str, ChartGrid]:
    """Return the grid of each chart of a page, by the name of its section.

    Args:
        page: with the charts; its text is hidden.
        canvas: an empty page to read pixels in.
    """
    page.add_style_tag(content="svg text { visibility: hidden }")
    palette = palette_of(page)
    grids: dict[str, ChartGrid] = {}
    for section in page.locator("section:has(svg)").all():
        chart = section.locator("svg")
        # Of a row of bars, in the page's own units.
        num_rows = max(1, round(float(chart.get_attribute("viewBox").split()[3]) / 22))
        used, clip = chart.evaluate(_USED), chart.evaluate(_ALIGN)
        png = base64.b64encode(page.screenshot(clip=clip)).decode()
        chart.evaluate("chart => chart.removeAttribute('style')")
        own = {letter: color for letter, color in palette.items() if letter in _NOTHING or color in used}
        given = {"png": png, "palette": own, "columns": COLUMNS, "rows": num_rows, **clip}
        shares = canvas.evaluate(_GRID, given)
        letters = "".join(map(_letter_of, shares))
        rows = [letters[at : at + COLUMNS] for at in range(0, len(letters), COLUMNS)]
        grids[section.get_attribute("id")] = ChartGrid(rows, shares, png, palette)
    return grids


def picture_of_both(browser: Browser, kept: list[str], found: ChartGrid) -> bytes:
    """Return a picture of a chart as it is kept, as it is, and of the cells that differ, as PNG."""
    page = browser.new_page(viewport={"width": 1000, "height": 400})
    given = {"kept": kept, "found": found.rows, "columns": COLUMNS, "palette": found.palette, "png": found.png}
    page.evaluate(_PICTURE, {**given, "wrong": found.wrong_cells(kept)})
    picture = page.screenshot(full_page=True)
    page.close()
    return picture
