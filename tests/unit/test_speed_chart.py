# SPDX-License-Identifier: Apache-2.0
"""The picture of speed fits its figures, and these fit docs/benchmarks.md."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parents[2] / "docs"
LONG_NAMES = {"DDP": "DistributedDataParallel", "spawn": "torch.multiprocessing.spawn"}


@pytest.fixture(scope="module")
def chart() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("rankwise_speed_chart", DOCS / "speed_chart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


@pytest.mark.parametrize("name", ["light", "dark"])
def test_the_picture_is_drawn_from_the_figures(chart: Any, name: str) -> None:
    for language, folder in chart.FOLDERS.items():
        drawn = chart.draw(chart.read(), chart.COLORS[name], language)
        assert (folder / f"speed-{name}.svg").read_text("utf-8") == drawn, "run make chart"


def test_a_bar_ends_in_the_middle_of_its_range(chart: Any) -> None:
    figures = chart.read()
    drawn = chart.draw(figures, chart.COLORS["dark"], "en")
    widths = [float(width) for width in re.findall(r'<rect .*?width="([\d.]+)"', drawn)]
    one = re.search(r'<path d="M(\d+) ', drawn)
    assert one is not None
    assert [width / (int(one[1]) - chart.LEFT) for width in widths] == pytest.approx(
        [(figure.lowest + figure.highest) / 2 for figure in figures], abs=1e-3
    )
    assert re.findall(r'text-anchor="end" fill="[^"]+">([\d. to]+)<', drawn) == [figure.ratio for figure in figures]


def test_a_line_shows_the_range_of_a_bar(chart: Any) -> None:
    figures = [figure for figure in chart.read() if figure.lowest < figure.highest]
    lines = re.findall(
        r'<path class="range" d="M([\d.]+) \d+H([\d.]+)M', chart.draw(figures, chart.COLORS["light"], "en")
    )
    ends = [tuple((float(x) - chart.LEFT) / chart.UNIT for x in line) for line in lines]
    assert figures
    assert ends == [pytest.approx((figure.lowest, figure.highest), abs=1e-3) for figure in figures]


def test_each_figure_is_a_row_of_the_benchmarks(chart: Any) -> None:
    lines = [line.strip("|").split("|") for line in (DOCS / "benchmarks.md").read_text("utf-8").splitlines()]
    rows = {
        (line[1].strip(" `"), ratio) for line in lines if len(line) > 1 for ratio in line[-1].replace(",", "").split()
    }
    figures = [
        (LONG_NAMES.get(figure.peer, figure.peer), f"{end:.2f}")
        for figure in chart.read()
        for end in (figure.lowest, figure.highest)
    ]
    assert [figure for figure in figures if figure not in rows] == []


def test_ratios_are_taken_from_a_table_of_make_bench(chart: Any) -> None:
    figures = chart.read()
    rows = [f"| {figure.row} | 1 ms | 2 ms | 0.{number}49 | <= 1 |" for number, figure in enumerate(figures, 10)]
    table = "\n".join(["a line above", "| what | rankwise | peer | ratio | reach |", "|---|---|---|---|---|", *rows])
    slower = table.replace("49 |", "99 |")
    taken = chart.taken_from([table, slower], figures)
    assert [figure.lowest for figure in taken] == [number / 100 for number in range(10, 10 + len(figures))]
    assert [figure.highest for figure in taken] == [number / 100 for number in range(11, 11 + len(figures))]
    assert [figure.row for figure in taken] == [figure.row for figure in figures]
    with pytest.raises(SystemExit, match=re.escape(figures[-1].row)):
        chart.taken_from([table, table.replace(figures[-1].row, "another row")], figures)


def test_the_file_is_written_as_it_is_kept(chart: Any) -> None:
    assert chart.written(chart.read()) == chart.FIGURES.read_text("utf-8")
