# SPDX-License-Identifier: Apache-2.0
"""Draws speed-light.svg and speed-dark.svg: the time of rankwise relative to that of other tools.

Into docs/images/, and in Chinese into docs/zh/images/.

A bar ends in the middle of the ratios that were measured; a line across its end shows their range.

``python docs/speed_chart.py`` draws what docs/images/speed.json holds; ``python docs/speed_chart.py TABLE...`` first
takes the ranges from one or more tables that ``make bench`` printed. A test compares the pictures with the file, and
the file with docs/benchmarks.md.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

HERE = Path(__file__).parent
FOLDERS = {"en": HERE / "images", "zh": HERE / "zh" / "images"}
FIGURES = FOLDERS["en"] / "speed.json"
TITLE = "Time relative to other tools on 2 CPU cores: shorter is faster, 1.0 is as fast"
CHINESE = {
    TITLE: "与其他工具的用时之比，2 个 CPU 核：越短越快，1.0 表示一样快",
    "one training step on 2 ranks": "训练一步，2 个 rank",
    "wide MLP": "宽 MLP",
    "60 small layers": "60 个小层",
    "3D UNet": "3D UNet",
    "transformer": "transformer",
    "sharded transformer": "分片的 transformer",
    "around the step": "训练步之外",
    "all_reduce, 25 MB": "all_reduce，25 MB",
    "pause for a checkpoint": "保存检查点时的停顿",
    "start of 8 ranks": "启动 8 个 rank",
    "start of 2 ranks": "启动 2 个 rank",
    "function on 2 ranks": "在 2 个 rank 上运行函数",
    " against ": "，对比 ",
    " to ": " 至 ",
}
EDITIONS: Mapping[str, Mapping[str, str]] = {"en": {text: text for text in CHINESE}, "zh": CHINESE}

WIDTH = 760
LEFT = 250
"""Where the bars begin; labels end before it."""
UNIT = 360
"""Length of the bar of a ratio of 1."""
BAR = 16
CAP = 4
"""Half the height of the ends of a range."""
PITCH = 26
HEADING = 30
TOP = 50
BOTTOM = 12


@dataclass(frozen=True)
class Colors:
    """What a picture is drawn in; nothing is drawn behind it."""

    text: str
    faint: str
    bar: str


COLORS = {
    "light": Colors(text="#1f2328", faint="#59636e", bar="#0969da"),
    "dark": Colors(text="#f0f6fc", faint="#9198a1", bar="#4493f8"),
}


@dataclass(frozen=True)
class Figure:
    """One bar: what was measured against which peer, and the row of ``make bench`` that it is from."""

    group: str
    label: str
    peer: str
    row: str
    lowest: float
    highest: float

    @property
    def middle(self) -> float:
        """Of the ratios that were measured."""
        return (self.lowest + self.highest) / 2

    @property
    def ratio(self) -> str:
        """As docs/benchmarks.md has it."""
        ends = f"{self.lowest:.2f}", f"{self.highest:.2f}"
        return " to ".join(dict.fromkeys(ends))


def read(file: Path = FIGURES) -> list[Figure]:
    """Return the figures in the order they are drawn."""
    return [Figure(**fields) for fields in json.loads(file.read_text("utf-8"))]


def taken_from(tables: Sequence[str], figures: Sequence[Figure]) -> list[Figure]:
    """Return the figures with the ratios of tables of ``make bench``; a row that one of them lacks is an error."""
    runs = [_ratios_of(table) for table in tables]
    missing = [figure.row for figure in figures if any(figure.row not in run for run in runs)]
    if missing:
        raise SystemExit("the table has no row " + "\nnor ".join(missing))
    taken: list[Figure] = []
    for figure in figures:
        ratios = [round(float(run[figure.row]), 2) for run in runs]
        taken.append(replace(figure, lowest=min(ratios), highest=max(ratios)))
    return taken


def _ratios_of(table: str) -> dict[str, str]:
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    return {row[0]: row[3] for row in cells}


def written(figures: Sequence[Figure]) -> str:
    """Return the figures as the file has them, one a line."""
    lines = ",\n".join(" " + json.dumps(asdict(figure)) for figure in figures)
    return f"[\n{lines}\n]\n"


def draw(figures: Sequence[Figure], colors: Colors, language: str) -> str:
    """Return the picture."""
    words = EDITIONS[language]
    groups = [(name, list(bars)) for name, bars in groupby(figures, key=lambda figure: figure.group)]
    height = TOP + HEADING * len(groups) + PITCH * len(figures) + BOTTOM
    spoken = "; ".join(
        f"{words[figure.label]}{words[' against ']}{figure.peer} {_range_in(words, figure)}" for figure in figures
    )
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    font = 'font-family="system-ui, sans-serif" font-size="13"'
    one, title = LEFT + UNIT, words[TITLE]
    spoken = escape(f"{title}. {spoken}")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{spoken}" {font}>',
        f'<text x="{WIDTH // 2}" y="18" text-anchor="middle" font-size="14" fill="{colors.text}">{title}</text>',
        *_bars(groups, colors, words),
        f'<path d="M{one} {TOP}V{height - BOTTOM}" stroke="{colors.faint}" stroke-dasharray="4 3"/>',
        f'<text x="{one}" y="{TOP - 6}" text-anchor="middle" fill="{colors.faint}">1.0</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _bars(groups: Sequence[tuple[str, Sequence[Figure]]], colors: Colors, words: Mapping[str, str]) -> Iterator[str]:
    y = TOP
    for name, figures in groups:
        yield f'<text x="12" y="{y + 19}" font-weight="600" fill="{colors.text}">{escape(words[name])}</text>'
        y += HEADING
        for figure in figures:
            length = round(UNIT * figure.middle, 1)
            base = y + BAR - 3
            yield (
                f'<text x="{LEFT - 10}" y="{base}" text-anchor="end" fill="{colors.text}">{escape(words[figure.label])}'
                f'<tspan fill="{colors.faint}"> / {escape(figure.peer)}</tspan></text>'
            )
            yield f'<rect x="{LEFT}" y="{y}" width="{length:g}" height="{BAR}" rx="2" fill="{colors.bar}"/>'
            if figure.lowest < figure.highest:
                yield _range(figure, y + BAR // 2, colors)
            ratio = _range_in(words, figure)
            yield f'<text x="{WIDTH - 12}" y="{base}" text-anchor="end" fill="{colors.text}">{ratio}</text>'
            y += PITCH


def _range_in(words: Mapping[str, str], figure: Figure) -> str:
    return figure.ratio.replace(" to ", words[" to "])


def _range(figure: Figure, y: int, colors: Colors) -> str:
    first, last = (round(LEFT + UNIT * ratio, 1) for ratio in (figure.lowest, figure.highest))
    ends = "".join(f"M{x:g} {y - CAP}v{2 * CAP}" for x in (first, last))
    return f'<path class="range" d="M{first:g} {y}H{last:g}{ends}" stroke="{colors.text}" stroke-width="1.5"/>'


def main() -> None:
    """Take new ratios where tables are given, and draw."""
    figures = read()
    if sys.argv[1:]:
        figures = taken_from([Path(table).read_text("utf-8") for table in sys.argv[1:]], figures)
        FIGURES.write_text(written(figures), encoding="utf-8")
    for language, folder in FOLDERS.items():
        for name, colors in COLORS.items():
            (folder / f"speed-{name}.svg").write_text(draw(figures, colors, language), encoding="utf-8")


if __name__ == "__main__":
    main()
