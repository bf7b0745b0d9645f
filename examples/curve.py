# SPDX-License-Identifier: Apache-2.0
"""Draws curves into an SVG file, with nothing but Python: the lessons of the course use it for their plots."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 24, 52
COLORS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df")
TEXT = "#1f2328"
FAINT = "#d0d7de"
FONT = 'font-family="system-ui, sans-serif" font-size="13"'
LINE = 16
"""Between two names, one below the other."""
NUM_LINES = 4
"""Lines across, below the topmost."""


def _round_step(highest: float) -> float:
    """Return a round number of which ``NUM_LINES`` reach the highest value."""
    size = 10.0 ** math.floor(math.log10(highest / NUM_LINES))
    return next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor * NUM_LINES >= highest)


def _apart(heights: Mapping[str, float]) -> dict[str, float]:
    """Return the heights of names beside the ends of their curves, lowest name first, so that none covers another."""
    apart: dict[str, float] = {}
    above = float(HEIGHT)
    for name in sorted(heights, key=heights.__getitem__, reverse=True):
        above = apart[name] = min(heights[name], above - LINE)
    return apart


def draw(
    path: Path, curves: Mapping[str, Sequence[tuple[float, float]]], *, x_label: str, y_label: str, title: str
) -> None:
    """Write a picture of curves, each a list of points (x, y); the y axis begins at zero."""
    xs = sorted({x for points in curves.values() for x, _ in points})
    step = _round_step(max(y for points in curves.values() for _, y in points))
    highest = step * NUM_LINES
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - xs[0]) / (xs[-1] - xs[0] or 1)
        return round(LEFT + wide * across, 1), round(TOP + high * (1 - y / highest), 1)

    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for number in range(NUM_LINES + 1):
        value = step * number
        _, y = place(xs[0], value)
        lines += [
            f'<path d="M{LEFT} {y}h{wide}" stroke="{FAINT}"/>',
            f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end" fill="{TEXT}">{value:g}</text>',
        ]
    for x in xs:
        lines.append(
            f'<text x="{place(x, 0)[0]}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="{TEXT}">{x:g}</text>'
        )
    heights = _apart({name: place(*points[-1])[1] + 4 for name, points in curves.items()})
    for (name, points), color in zip(curves.items(), COLORS, strict=False):
        places = [place(x, y) for x, y in points]
        joined = " ".join(f"{x},{y}" for x, y in places)
        lines.append(f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="2"/>')
        lines += [f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>' for x, y in places]
        lines.append(f'<text x="{LEFT + wide + 10}" y="{heights[name]}" fill="{color}">{escape(name)}</text>')
    turned = f'transform="translate(16 {TOP + high / 2}) rotate(-90)"'
    lines += [
        f'<text x="{LEFT + wide / 2}" y="{HEIGHT - 12}" text-anchor="middle" fill="{TEXT}">{escape(x_label)}</text>',
        f'<text {turned} text-anchor="middle" fill="{TEXT}">{escape(y_label)}</text>',
        "</svg>",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
