# SPDX-License-Identifier: Apache-2.0
"""A chart as a file by itself: with its title, its legend and its colors inside."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from rankwise.charts.colors import picture_style
from rankwise.charts.shapes import LABEL_WIDTH, WIDTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.charts.shapes import Chart

_MARGIN = 12
_TOP = 62
"""Height of the title and the legend."""
_LEGEND_WIDTH = 150
"""Of one entry."""


def picture_of(chart: Chart, title: str, legend: Sequence[tuple[str, str]]) -> str:
    """Return a chart as the text of an SVG file; ``legend`` holds style and name of each kind of mark."""
    width, height = WIDTH + 2 * _MARGIN, chart.height + _TOP + _MARGIN
    left = _MARGIN + LABEL_WIDTH
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" '
        f'viewBox="0 0 {width} {height:g}" width="{width}" height="{height:g}">'
    )
    lines = [
        head,
        f"<style>\n{picture_style()}\n</style>",
        f'<rect class="back" width="{width}" height="{height:g}"/>',
        f'<text class="title" x="{_MARGIN}" y="22">{escape(title)}</text>',
    ]
    for place, (style, name) in enumerate(legend):
        x = left + place * _LEGEND_WIDTH
        lines.append(f'<rect class="{style}" x="{x}" y="36" width="12" height="12"/>')
        lines.append(f'<text x="{x + 17}" y="46">{escape(name)}</text>')
    return "\n".join([*lines, f'<g transform="translate({_MARGIN} {_TOP})">{chart.svg}</g>', "</svg>", ""])
