# SPDX-License-Identifier: Apache-2.0
"""A picture of a measured step: a row per rank, a box per forward and backward, gaps where a rank waited.

Spans in, SVG text or a PNG file out. Used by pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from rankwise.errors import ConfigurationError
from rankwise.parallel.pipeline.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.parallel.pipeline.executor import Span

COLOURS = {FORWARD: "#4c78a8", BACKWARD: "#f58518", BACKWARD_INPUT: "#e45756", BACKWARD_WEIGHT: "#72b7b2"}
LETTERS = {FORWARD: "F", BACKWARD: "B", BACKWARD_INPUT: "I", BACKWARD_WEIGHT: "W"}
WIDTH, LEFT, ROW, TOP, BOTTOM = 1000, 70, 34, 62, 34
LEAST_WIDTH = 12.0
"""Of a box that its name fits into, in pixels."""


@dataclass(frozen=True)
class Picture:
    """A measured step."""

    schedule: str
    num_stages: int
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """From the meeting of the ranks to the end of the last one."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def num_ranks(self) -> int:
        """How many ranks took part."""
        return 1 + max((span.rank for span in self.spans), default=-1)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they computed nothing."""
        whole = self.seconds * self.num_ranks
        return 1.0 - sum(span.end - span.start for span in self.spans) / whole if whole else 0.0

    @property
    def title(self) -> str:
        """What the picture shows, in one line."""
        num_micro_batches = 1 + max((span.micro_batch for span in self.spans), default=-1)
        return (
            f"{self.schedule}: {self.num_stages} stages on {self.num_ranks} ranks, {num_micro_batches} micro-batches, "
            f"{seconds_text(self.seconds)}, bubble {self.bubble:.0%}"
        )


def seconds_text(seconds: float) -> str:
    """Return a time in the unit in which it is easily read."""
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{seconds * 1e3:.3g} ms"


def write_picture(picture: Picture, path: Path) -> None:
    """Write the picture; its format follows from the ending of ``path``.

    Raises:
        ConfigurationError: the ending is neither ``.svg`` nor ``.png``, or matplotlib is missing.
    """
    ending = path.suffix.lower()
    if not path.parent.is_dir():
        raise ConfigurationError(f"The folder {str(path.parent)!r} of draw() does not exist.", do="create it first")
    if ending == ".svg":
        path.write_text(svg(picture), encoding="utf-8")
    elif ending == ".png":
        _write_png(picture, path)
    else:
        raise ConfigurationError(f"draw() writes .svg and .png, not {str(path)!r}.", do='pass "schedule.svg"')


def svg(picture: Picture) -> str:
    """Return the picture as SVG."""
    height = TOP + picture.num_ranks * ROW + BOTTOM
    scale = (WIDTH - LEFT - 20) / (picture.seconds or 1.0)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">',
        "<style>text {font: 11px sans-serif} .title {font-size: 14px}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" class="title">{escape(picture.title)}</text>',
    ]
    for place, kind in enumerate(dict.fromkeys(span.kind for span in picture.spans)):
        x = LEFT + place * 170
        lines.append(f'<rect x="{x}" y="32" width="12" height="12" fill="{COLOURS[kind]}"/>')
        lines.append(f'<text x="{x + 17}" y="42">{LETTERS[kind]} {kind}</text>')
    for rank in range(picture.num_ranks):
        y = TOP + rank * ROW
        lines.append(f'<text x="8" y="{y + ROW / 2 + 4:g}">rank {rank}</text>')
        lines.append(
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 20}" height="{ROW - 4}" fill="#eeeeee" stroke="none"/>'
        )
    lines += [_box(span, scale) for span in picture.spans]
    y = TOP + picture.num_ranks * ROW + 14
    for part in range(5):
        x = LEFT + part * (WIDTH - LEFT - 20) / 4
        label = seconds_text(picture.seconds * part / 4)
        lines.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle" fill="#555555">{label}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _box(span: Span, scale: float) -> str:
    x, width = LEFT + span.start * scale, (span.end - span.start) * scale
    y = TOP + span.rank * ROW
    title = f"{span.kind}, stage {span.stage}, micro-batch {span.micro_batch}: {seconds_text(span.end - span.start)}"
    label = ""
    if width >= LEAST_WIDTH:
        label = (
            f'<text x="{x + width / 2:.2f}" y="{y + ROW / 2 + 2:g}" text-anchor="middle" fill="white">'
            f"{LETTERS[span.kind] if width >= 2 * LEAST_WIDTH else ''}{span.micro_batch}</text>"
        )
    return (
        f'<g><title>{escape(title)}</title><rect x="{x:.2f}" y="{y}" width="{max(width, 0.5):.2f}" height="{ROW - 4}" '
        f'fill="{COLOURS[span.kind]}" stroke="white" stroke-width="0.5"/>{label}</g>'
    )


def _write_png(picture: Picture, path: Path) -> None:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - not everybody has it
    except ImportError as error:
        raise ConfigurationError(
            "draw() needs matplotlib for .png, and it is not installed.", do="pip install matplotlib, or draw an .svg"
        ) from error
    figure = Figure(figsize=(10, 1.6 + 0.4 * picture.num_ranks), layout="constrained")
    axes = figure.subplots()
    unit, scale = ("s", 1.0) if picture.seconds >= 1.0 else ("ms", 1e3)
    for kind in dict.fromkeys(span.kind for span in picture.spans):
        ours = [span for span in picture.spans if span.kind == kind]
        axes.barh(
            [span.rank for span in ours],
            [(span.end - span.start) * scale for span in ours],
            left=[span.start * scale for span in ours],
            color=COLOURS[kind],
            edgecolor="white",
            label=kind,
        )
    axes.set_yticks(range(picture.num_ranks), [f"rank {rank}" for rank in range(picture.num_ranks)])
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(picture.title, fontsize=10)
    axes.set_xlim(left=0)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=150)
