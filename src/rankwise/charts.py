# SPDX-License-Identifier: Apache-2.0
"""Charts as SVG text: stacked bars, rows of cells or spans, a map of rank by step, and lines; their colors and units.

Every mark has a title that says its value, and every chart a label for readers who do not see it. A chart may also be a
file by itself, with its title, its legend and its colors inside. Values in, text out; writes no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

WIDTH = 720
LABEL_WIDTH = 90
"""Of labels, at least: longer ones take more."""
LABEL_CHARACTERS = 24
"""The longest label that a chart has room for."""
ROW_HEIGHT = 22
MOST_COLUMNS = 240
"""How many columns or points a chart shows at most; steps are averaged for that."""
_LINE_HEIGHT = 180
_CHARACTER_WIDTH = 11
"""Of a text on a phone, where a page makes it larger."""
_MARGIN = 12
_TOP = 62
"""Height of the title and the legend."""
_LEGEND_WIDTH = 150
"""Of one entry."""
STYLES = {
    "forward": "forward",
    "backward": "backward",
    "backward of inputs": "exchange",
    "backward of weights": "optimizer",
}
"""Of each kind of box in a measured step of a pipeline: a row per rank, gaps where a rank waited."""
ENGLISH = {"rank": "rank", "stage": "stage", "micro-batch": "micro-batch"}

Measured = tuple[int, str, int, int, float, float]
"""Rank, kind, stage, micro-batch, beginning and end in seconds, of one forward or backward."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart as SVG text, :data:`WIDTH` wide."""

    svg: str
    height: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One row of stacked bars."""

    label: str
    parts: tuple[tuple[str, float], ...]
    """The style and the length of each part, in order."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a row: its style, a short text, and what it says."""

    style: str
    text: str
    title: str


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a row, in seconds: its style, from when to when, a short text, and what it says."""

    style: str
    start: float
    end: float
    text: str
    title: str


def cells(rows: Sequence[tuple[str, Sequence[Cell]]], title: str) -> Chart:
    """Return rows of equally wide cells, each row with its label."""
    width = (WIDTH - _left(label for label, _ in rows)) / max(len(row) for _, row in rows)
    placed = [
        (label, [(place * width, width, cell.style, cell.text, cell.title) for place, cell in enumerate(row)])
        for label, row in rows
    ]
    return _svg(len(rows) * ROW_HEIGHT, title, _boxes(placed))


def spans(rows: Sequence[tuple[str, Sequence[Span]]], title: str, words: Callable[[float], str]) -> Chart:
    """Return rows of spans over one axis of time, each row with its label; ``words`` describes a time on the axis."""
    whole = max((span.end for _, row in rows for span in row), default=0.0)
    left = _left(label for label, _ in rows)
    scale = (WIDTH - left) / (whole or 1.0)
    placed = [
        (
            label,
            [(span.start * scale, (span.end - span.start) * scale, span.style, span.text, span.title) for span in row],
        )
        for label, row in rows
    ]
    bottom = len(rows) * ROW_HEIGHT
    axis = [
        _text(left + part * (WIDTH - left) / 4, bottom + 15, words(whole * part / 4), anchor=anchor)
        for part, anchor in enumerate(("start", "middle", "middle", "middle", "end"))
    ]
    return _svg(bottom + ROW_HEIGHT, title, [*_boxes(placed), *axis])


def schedule_rows(measured: Sequence[Measured], names: Mapping[str, str] = ENGLISH) -> list[tuple[str, list[Span]]]:
    """Return the row of each rank, with its label.

    Args:
        measured: of all ranks; at least one.
        names: what "rank", "stage" and "micro-batch" are called.
    """
    rows: list[list[Span]] = [[] for _ in range(1 + max(rank for rank, *_ in measured))]
    for rank, kind, stage, micro_batch, start, end in measured:
        told = f"{kind}, {names['stage']} {stage}, {names['micro-batch']} {micro_batch}: {duration(end - start)}"
        rows[rank].append(Span(STYLES[kind], start, end, str(micro_batch), told))
    return [(f"{names['rank']} {rank}", row) for rank, row in enumerate(rows)]


def schedule_legend(measured: Sequence[Measured]) -> list[tuple[str, str]]:
    """Return style and name of each kind of box that there is, in the order in which they are first met."""
    return [(STYLES[kind], kind) for kind in dict.fromkeys(kind for _, kind, *_ in measured)]


def _boxes(rows: Sequence[tuple[str, Sequence[tuple[float, float, str, str, str]]]]) -> list[str]:
    """Return rows of boxes: where each begins and how wide it is, its style, text and title."""
    marks = []
    left = _left(label for label, _ in rows)
    for row, (label, boxes) in enumerate(rows):
        top = row * ROW_HEIGHT
        marks.append(_text(left - 6, top + 15, label, anchor="end"))
        for x, width, style, text, words in boxes:
            marks.append(
                f'<rect class="{style} cell" x="{left + x:.1f}" y="{top + 2}" width="{max(width, 0.5):.1f}" '
                f'height="{ROW_HEIGHT - 4}"><title>{escape(words)}</title></rect>'
            )
            if text and width >= _CHARACTER_WIDTH * len(text):
                middle = left + x + width / 2
                marks.append(
                    f'<text class="in" x="{middle:.1f}" y="{top + 15}" text-anchor="middle">{escape(text)}</text>'
                )
    return marks


def _left(labels: Iterable[str]) -> float:
    """Return where the marks of rows begin, to the right of their labels."""
    return max(LABEL_WIDTH, 8 + _CHARACTER_WIDTH * max(map(len, labels)))


def binned(values: Floats) -> tuple[Floats, int]:
    """Return means along the last axis in at most ``MOST_COLUMNS`` columns, and how many values each stands for.

    They are the means of the values that are finite; NaN where none is.
    """
    per_column = -(-values.shape[-1] // MOST_COLUMNS)
    starts = np.arange(0, values.shape[-1], per_column)
    finite = np.isfinite(values)
    sums = np.add.reduceat(np.where(finite, values, 0.0), starts, axis=-1)
    counts = np.add.reduceat(finite.astype(np.float64), starts, axis=-1)
    return np.where(counts > 0.0, sums / np.maximum(counts, 1.0), np.nan), per_column


def stacked_bars(bars: Sequence[Bar], title: str, words: Callable[[str, float], str]) -> Chart:
    """Return rows of bars that share one scale; ``words`` describes a part by style and length."""
    longest = max(sum(length for _, length in bar.parts) for bar in bars) or 1.0
    start = _left(bar.label for bar in bars)
    scale = (WIDTH - start) / longest
    marks = []
    for row, bar in enumerate(bars):
        top, left = row * ROW_HEIGHT, start
        marks.append(_text(start - 6, top + 15, bar.label, anchor="end"))
        for style, length in bar.parts:
            width = length * scale
            if width >= 0.1:  # noqa: PLR2004 - thinner ones cannot be seen
                marks.append(
                    f'<rect class="{style}" x="{left:.1f}" y="{top + 2}" width="{width:.1f}" '
                    f'height="{ROW_HEIGHT - 4}"><title>{escape(words(style, length))}</title></rect>'
                )
            left += width
    return _svg(len(bars) * ROW_HEIGHT, title, marks)


def heat_map(values: Floats, labels: Sequence[str], title: str, words: Callable[[int, int, float], str]) -> Chart:
    """Return a map with a row per label: the darker, the larger a value is between the smallest and the largest.

    Args:
        values: [row, column].
        labels: of the rows.
        title: of the map.
        words: describes row, column and value.
    """
    num_columns = values.shape[1]
    low, high = float(np.quantile(values, 0.02)), float(np.quantile(values, 0.98))
    shades = np.clip((values - low) / max(high - low, 1e-12) * (NUM_SHADES - 1), 0, NUM_SHADES - 1).round().astype(int)
    left = _left(labels)
    width = (WIDTH - left) / num_columns
    marks = []
    for row, label in enumerate(labels):
        marks.append(_text(left - 6, row * ROW_HEIGHT + 15, label, anchor="end"))
        marks += [
            f'<rect class="heat{shades[row, column]}" x="{left + column * width:.2f}" '
            f'y="{row * ROW_HEIGHT + 1}" width="{width + 0.3:.2f}" height="{ROW_HEIGHT - 2}">'
            f"<title>{escape(words(row, column, float(values[row, column])))}</title></rect>"
            for column in range(num_columns)
        ]
    return _svg(len(labels) * ROW_HEIGHT, title, marks)


def lines(
    series: Sequence[tuple[str, Floats, Floats]],
    title: str,
    words: Callable[[float], str],
    axis: str,
    *,
    from_zero: bool = True,
) -> Chart:
    """Return curves over one axis; each is a name, its x values [n], whole numbers, and its y values [n]."""
    every = np.concatenate([ys for _, _, ys in series])
    finite = every[np.isfinite(every)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    low = 0.0 if from_zero and low > 0.0 else low
    high = high if high > low else low + max(1.0, abs(low))
    first = min(float(xs[0]) for _, xs, _ in series)
    last = max(float(xs[-1]) for _, xs, _ in series)
    across = (WIDTH - LABEL_WIDTH - 10) / max(last - first, 1e-12)
    top, height = 16, _LINE_HEIGHT - 38
    marks = []
    for share in (0.0, 0.5, 1.0):
        y = top + height * (1 - share)
        marks.append(f'<line class="grid" x1="{LABEL_WIDTH}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(_text(LABEL_WIDTH - 6, y + 4, words(low + share * (high - low)), anchor="end"))
    marks.append(_text(LABEL_WIDTH, _LINE_HEIGHT - 4, f"{first:,.0f}"))
    marks.append(_text((LABEL_WIDTH + WIDTH) / 2, _LINE_HEIGHT - 4, axis, anchor="middle"))
    marks.append(_text(WIDTH, _LINE_HEIGHT - 4, f"{last:,.0f}", anchor="end"))
    for number, (name, xs, ys) in enumerate(series):
        points = " ".join(
            f"{LABEL_WIDTH + (x - first) * across:.1f},{top + height * (1 - (y - low) / (high - low)):.1f}"
            for x, y in zip(xs, ys, strict=True)
            if np.isfinite(y)
        )
        marks.append(
            f'<polyline class="curve curve{number % NUM_KEYS}" points="{points}"><title>{escape(name)}</title>'
        )
        marks.append("</polyline>")
    return _svg(_LINE_HEIGHT, title, marks)


def _svg(height: float, title: str, marks: Sequence[str]) -> Chart:
    return Chart(
        f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {WIDTH} {height:g}" '
        f'width="{WIDTH}" height="{height:g}">{"".join(marks)}</svg>',
        height,
    )


def _text(x: float, y: float, words: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


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


# -- colors, on light and dark screens, as CSS -----------------------------------------------------------

NUM_KEYS = 8
"""How many colors there are for things of one kind."""
_LIGHT = {
    "text": "#1f2328",
    "back": "#ffffff",
    "soft": "#59636e",
    "line": "#d1d9e0",
    "card": "#f6f8fa",
    "script": "#8c959f",
    "data": "#bf8700",
    "forward": "#0969da",
    "backward": "#54aeff",
    "exchange": "#8250df",
    "waiting": "#cf222e",
    "optimizer": "#1a7f37",
    "checkpoint": "#bc4c00",
    "evaluation": "#57606a",
    "heat-low": "#ddf4ff",
    "heat-high": "#0a3069",
}
_DARK = {
    "text": "#e6edf3",
    "back": "#0d1117",
    "soft": "#9198a1",
    "line": "#3d444d",
    "card": "#151b23",
    "script": "#656c76",
    "data": "#d29922",
    "forward": "#1f6feb",
    "backward": "#79c0ff",
    "exchange": "#a371f7",
    "waiting": "#f85149",
    "optimizer": "#3fb950",
    "checkpoint": "#db6d28",
    "evaluation": "#8b949e",
    "heat-low": "#0c2d6b",
    "heat-high": "#cae8ff",
}
_PARTS = ("data", "forward", "backward", "exchange", "waiting", "optimizer", "script", "checkpoint", "evaluation")
_KEYS = ("forward", "data", "optimizer", "exchange", "checkpoint", "backward", "script", "evaluation")
NUM_SHADES = 8
"""How many shades a map has."""


def page_style() -> str:
    """Return the style of a page's charts, and the variables ``--text``, ``--back`` and others for the rest of it."""
    return "\n".join(
        [
            f":root {{ color-scheme: light dark; {_variables(_LIGHT)} }}",
            f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK)} }} }}",
            *_rules(lambda name: f"var(--{name})"),
        ]
    )


def picture_style() -> str:
    """Return the style of a picture by itself, without variables: not every program that shows SVG knows them."""
    return "\n".join(
        [*_rules(_LIGHT.__getitem__), "@media (prefers-color-scheme: dark) {", *_rules(_DARK.__getitem__), "}"]
    )


def _variables(colors: dict[str, str]) -> str:
    return "; ".join(f"--{name}: {color}" for name, color in colors.items())


def _rules(color: Callable[[str], str]) -> list[str]:
    shares = [round(100 * shade / (NUM_SHADES - 1)) for shade in range(NUM_SHADES)]
    return [
        f"svg text {{ font: 12px system-ui, sans-serif; fill: {color('soft')} }}",
        *(_filled(part, color(part)) for part in _PARTS),
        *(_filled(f"key{number}", color(name)) for number, name in enumerate(_KEYS)),
        *(
            f".heat{shade} {{ fill: color-mix(in oklab, {color('heat-high')} {share}%, {color('heat-low')}) }}"
            for shade, share in enumerate(shares)
        ),
        *(f".curve{number} {{ stroke: {color(name)} }}" for number, name in enumerate(_KEYS)),
        f".curve {{ fill: none; stroke-width: 1.6 }} .grid {{ stroke: {color('line')} }}",
        f".cell {{ stroke: {color('back')}; stroke-width: 1 }} svg text.in {{ fill: {color('back')} }}",
        f".back {{ fill: {color('back')} }} svg text.title {{ font-size: 14px; fill: {color('text')} }}",
    ]


def _filled(style: str, color: str) -> str:
    return f".{style} {{ fill: {color}; background: {color} }}"


# -- units ----------------------------------------------------------------------------------------------


_ROUNDED_UP = 0.9995
"""From which share of a unit on three digits show it whole."""


def duration(seconds: float) -> str:
    """Return a duration with three digits: ``12.3 ms``."""
    return _scaled(seconds, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))) if seconds else "0 s"


def memory(num_bytes: float) -> str:
    """Return a number of bytes with three digits: ``1.25 GiB``."""
    return _scaled(num_bytes, (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)))


def speed(bytes_per_second: float) -> str:
    """Return a speed with three digits: ``1.25 MB/s``."""
    return _scaled(bytes_per_second, (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)))


def _scaled(value: float, units: Sequence[tuple[str, float]]) -> str:
    """Return a value in the first unit of which it is at least one, once rounded, else in the last."""
    unit, size = next((one for one in units if value >= _ROUNDED_UP * one[1]), units[-1])
    value /= size
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2  # noqa: PLR2004 - three digits
    return f"{value:.{decimals}f} {unit}"
