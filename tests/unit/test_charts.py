# SPDX-License-Identifier: Apache-2.0
"""Charts as text: where marks are, how dark, and that no text becomes markup."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankwise.charts import (
    LABEL_WIDTH,
    MOST_COLUMNS,
    WIDTH,
    Bar,
    Cell,
    binned,
    cells,
    heat_map,
    lines,
    page_style,
    picture_of,
    picture_style,
    stacked_bars,
)

if TYPE_CHECKING:
    from rankwise.charts import Chart


def _marks(chart: Chart) -> list[tuple[str, float, float]]:
    """Return style, left edge and width of each rectangle."""
    found = re.findall(r'<rect class="([^"]+)" x="([\d.]+)" y="\d+" width="([\d.]+)"', chart.svg)
    return [(style, float(left), float(width)) for style, left, width in found]


def test_parts_of_a_bar_lie_side_by_side_and_bars_share_a_scale() -> None:
    bars = [Bar(label="a", parts=(("data", 1.0), ("forward", 3.0))), Bar(label="b", parts=(("data", 2.0),))]
    whole = WIDTH - LABEL_WIDTH
    assert _marks(stacked_bars(bars, "title", lambda _style, _length: "")) == [
        ("data", LABEL_WIDTH, pytest.approx(whole / 4, abs=0.1)),
        ("forward", pytest.approx(LABEL_WIDTH + whole / 4, abs=0.1), pytest.approx(whole * 3 / 4, abs=0.1)),
        ("data", LABEL_WIDTH, pytest.approx(whole / 2, abs=0.1)),
    ]


def test_a_map_is_darkest_where_values_are_largest() -> None:
    marks = _marks(heat_map(np.array([[0.0, 1.0], [0.5, 0.0]]), ["a", "b"], "title", lambda *_: ""))
    assert [style for style, _, _ in marks] == ["heat0", "heat7", "heat4", "heat0"]
    assert marks[0][1] == marks[2][1] < marks[1][1] == marks[3][1]


@pytest.mark.parametrize("length", [1, MOST_COLUMNS, MOST_COLUMNS + 1, 3 * MOST_COLUMNS - 1])
def test_each_column_is_the_mean_of_what_it_stands_for(length: int) -> None:
    values = np.arange(float(length))[None]
    columns, per_column = binned(values)
    expected = [values[0, start : start + per_column].mean() for start in range(0, length, per_column)]
    assert columns[0].tolist() == pytest.approx(expected)
    assert len(expected) <= MOST_COLUMNS


def test_texts_do_not_become_markup() -> None:
    word = '<b>&"'
    chart = cells([(word, [Cell("data", word, word)])], word)
    picture = picture_of(chart, word, [("data", word)])
    assert "<b>" not in picture
    assert picture.count("&lt;b&gt;&amp;") == 7


def test_light_and_dark_have_other_colors() -> None:
    for style in (page_style(), picture_style()):
        assert "#ffffff" in style
        assert "#0d1117" in style
    light, _, dark = picture_style().partition("@media (prefers-color-scheme: dark)")
    assert ".back { fill: #ffffff }" in light
    assert ".back { fill: #0d1117 }" in dark


def test_values_that_are_not_finite_leave_the_others_of_their_column() -> None:
    values = np.arange(3.0 * MOST_COLUMNS)
    values[::3] = np.nan
    values[-3:] = np.inf
    means, per_column = binned(values)
    assert per_column == 3
    assert means[:-1] == pytest.approx(np.arange(MOST_COLUMNS - 1) * 3 + 1.5)
    assert np.isnan(means[-1])


@pytest.mark.parametrize("value", [0.0, -2.0, 1e18])
def test_a_curve_of_one_value_is_a_line(value: float) -> None:
    chart = lines([("a", np.array([1.0, 2.0]), np.array([value, value]))], "title", str, "step", from_zero=False)
    assert "nan" not in chart.svg
    assert "<polyline" in chart.svg


def test_an_axis_of_steps_has_whole_numbers_and_its_name() -> None:
    chart = lines([("a", np.array([2.0, 9954.0]), np.array([1.0, 2.0]))], "title", str, "step")
    assert [text for text in (">2<", ">step<", ">9,954<") if text not in chart.svg] == []


def test_marks_begin_behind_the_longest_label() -> None:
    long, short = "model.encoder.weight", "b"
    (_, left, width), other = _marks(
        stacked_bars([Bar(label=label, parts=(("data", 1.0),)) for label in (long, short)], "title", lambda *_: "")
    )
    assert left == other[1] > LABEL_WIDTH
    assert left + width == pytest.approx(WIDTH)
