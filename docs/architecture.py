# SPDX-License-Identifier: Apache-2.0
"""Draws docs/architecture.svg from the code: the rooms, what each holds, and which may import which.

``python docs/architecture.py`` writes it; a test compares. The order of the rooms is the block ``layers`` of
architecture.md, everything else is read from ``src/rankwise``.
"""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src" / "rankwise"
PICTURE = HERE / "architecture.svg"

WIDTH = 1000
MARGIN = 12
GAP = 12
GAP_IN_LAYER = 5
"""Between rooms of one layer."""
MOST_IN_A_ROW = 52
PADDING = 12
LINE_HEIGHT = 15
CHARACTER_WIDTH = 6.1
"""Of the small text, on average: enough room for the fonts that browsers choose."""
CHIP_HEIGHT = 20

STYLE = """
text { font-family: system-ui, sans-serif; font-size: 11.5px; fill: #1f2328 }
.name { font-size: 15px; font-weight: 600 }
.size { fill: #59636e }
.room { fill: #f6f8fa; stroke: #8c959f }
.chip { fill: none; stroke: #d1d9e0 }
.folder { fill: #ddf4ff; stroke: #54aeff }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .size { fill: #9198a1 }
  .room { fill: #161b22; stroke: #656c76 } .chip { stroke: #3d444d }
  .folder { fill: #10233f; stroke: #1f6feb }
}
"""

INTRODUCTIONS = {
    "rest": "The rest: most jobs import only insight of it, and the core imports none of it.",
    "core": "The core: what a training step may pass.",
}


@dataclass(frozen=True, slots=True)
class Room:
    """A module or a folder directly below ``src/rankwise``."""

    name: str
    holds: str
    """First sentence of its docstring."""
    num_modules: int
    folders: tuple[str, ...]
    files: tuple[str, ...]
    """Directly in its folder, without ``.py``."""

    @property
    def entries(self) -> tuple[str, ...]:
        """What a reader of the folder sees; folders end in a slash."""
        return (*(f"{name}/" for name in self.folders), *self.files)


@dataclass(frozen=True, slots=True)
class Layers:
    """Names of rooms, the highest layer first."""

    rest: list[list[str]]
    """What nothing of the core imports."""
    core: list[list[str]]
    """What a training step may pass."""

    @property
    def all(self) -> list[list[str]]:
        """Both, the rest above the core."""
        return self.rest + self.core


def layers() -> Layers:
    """Read the block ``layers`` of architecture.md."""
    block = re.search(r"```layers\n(.*?)```", (HERE / "architecture.md").read_text(encoding="utf-8"), re.DOTALL)
    if block is None:
        raise ValueError("docs/architecture.md has no block ```layers")
    rest, core = ([line.split() for line in part.split("\n") if line.strip()] for part in block[1].split("----\n"))
    return Layers(rest, core)


def room_of(name: str) -> Room:
    """Read a room from the code."""
    folder = SOURCE / name
    file = folder / "__init__.py" if (folder / "__init__.py").exists() else SOURCE / f"{name}.py"
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    first = re.split(r"(?<=\.)\s", text.replace("``", "").replace("\n", " "), maxsplit=1)[0]
    folders = sorted(inner.parent.name for inner in folder.glob("*/__init__.py"))
    modules = [path for path in folder.rglob("*.py") if path.name != "__init__.py"] if folder.is_dir() else [file]
    files = sorted(path.stem for path in modules if path.parent == folder and not path.stem.startswith("__"))
    return Room(name, first, len(modules), tuple(folders), tuple(files))


def draw() -> str:
    """Return the picture, as SVG."""
    parts: list[str] = []
    introduced: set[str] = set()
    top = 0.0
    drawn = layers()
    for part, names in [*(("rest", names) for names in drawn.rest), *(("core", names) for names in drawn.core)]:
        if part not in introduced:
            introduced.add(part)
            top += 16
            parts.append(f'<text x="{MARGIN}" y="{top:.0f}">{INTRODUCTIONS[part]}</text>')
            top += 8
        for rooms in _rows([room_of(name) for name in names]):
            free = WIDTH - 2 * MARGIN - GAP * (len(rooms) - 1)
            widths = [free * _weight(room) / sum(map(_weight, rooms)) for room in rooms]
            height = max(_height(room, width) for room, width in zip(rooms, widths, strict=True))
            left = float(MARGIN)
            for room, width in zip(rooms, widths, strict=True):
                parts += _box(room, left, top, width, height)
                left += width + GAP
            top += height + GAP_IN_LAYER
        top += GAP - GAP_IN_LAYER
    parts.append(f'<text x="{MARGIN}" y="{top + 8:.0f}">A room imports rooms of the layers below, and no other.</text>')
    height = top + 20
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">'
    return "\n".join([head, "<title>The rooms of rankwise</title>", f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def _rows(rooms: list[Room]) -> list[list[Room]]:
    """Return the rooms of a layer in rows that are not too full."""
    rows: list[list[Room]] = []
    for room in rooms:
        if not rows or sum(map(_weight, [*rows[-1], room])) > MOST_IN_A_ROW:
            rows.append([])
        rows[-1].append(room)
    return rows


def _weight(room: Room) -> int:
    return 6 + len(room.entries)


def _box(room: Room, left: float, top: float, width: float, height: float) -> list[str]:
    parts = [
        f'<rect class="room" x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{height:.0f}" rx="6"/>',
        f'<text x="{left + PADDING:.0f}" y="{top + 22:.0f}"><tspan class="name">{room.name}</tspan>'
        + (f'<tspan class="size" dx="6">{room.num_modules} files</tspan>' if room.num_modules > 1 else "")
        + "</text>",
    ]
    y = top + 40
    for line in _lines(room, width):
        parts.append(f'<text x="{left + PADDING:.0f}" y="{y:.0f}">{escape(line)}</text>')
        y += LINE_HEIGHT
    y -= LINE_HEIGHT - 8
    for row in _chips(room, width):
        x = left + PADDING
        for name in row:
            chip = _chip_width(name)
            kind = "folder chip" if name.endswith("/") else "chip"
            parts.append(
                f'<rect class="{kind}" x="{x:.0f}" y="{y:.0f}" width="{chip:.0f}" height="{CHIP_HEIGHT}" rx="4"/>'
            )
            parts.append(f'<text x="{x + 6:.0f}" y="{y + 14:.0f}">{name}</text>')
            x += chip + 6
        y += CHIP_HEIGHT + 5
    return parts


def _height(room: Room, width: float) -> float:
    return 40 + LINE_HEIGHT * len(_lines(room, width)) + (CHIP_HEIGHT + 5) * len(_chips(room, width))


def _lines(room: Room, width: float) -> list[str]:
    return textwrap.wrap(room.holds, int((width - 2 * PADDING) / CHARACTER_WIDTH))


def _chips(room: Room, width: float) -> list[list[str]]:
    rows: list[list[str]] = []
    used = 0.0
    for name in room.entries:
        chip = _chip_width(name) + 6
        if not rows or used + chip > width - 2 * PADDING:
            rows.append([])
            used = 0.0
        rows[-1].append(name)
        used += chip
    return rows


def _chip_width(name: str) -> float:
    return CHARACTER_WIDTH * len(name) + 14


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
