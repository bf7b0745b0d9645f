# SPDX-License-Identifier: Apache-2.0
"""What ``rankwise report`` and ``rankwise show`` print: tables in columns, and numbers in the unit to read."""

from __future__ import annotations

import re

import pytest
from test_findings import job
from test_network_findings import run_of

from rankwise.charts import duration, memory, speed
from rankwise.insight.html import tabled
from rankwise.insight.layouts import layout_sections, page_of_mesh
from rankwise.insight.page import page_of
from rankwise.insight.tables import MOST_ROWS, Table, text_of
from rankwise.meter import DATA


def test_numbers_are_aligned_on_the_right_and_texts_on_the_left() -> None:
    head, rows = ("part", "share", "mean"), (("data", "8 %", "1.50 ms"), ("backward", "42 %", "10.0 ms"))
    numbers = Table(caption="Parts", head=head, rows=rows)
    assert text_of(numbers, "").splitlines() == [
        "Parts",
        "part      share     mean",
        "data        8 %  1.50 ms",
        "backward   42 %  10.0 ms",
    ]
    texts = Table(caption="", head=head, rows=rows, is_text=True)
    assert text_of(texts, "").splitlines()[1] == "data      8 %    1.50 ms"


def test_chinese_characters_take_two_columns() -> None:
    table = Table(caption="", head=("", "占比"), rows=(("前向", "21 %"), ("rank", "3 %")))
    assert text_of(table, "").splitlines() == ["      占比", "前向  21 %", "rank   3 %"]


def test_rows_that_a_terminal_has_no_room_for_are_counted() -> None:
    rows = tuple((str(number),) for number in range(MOST_ROWS + 3))
    *_, last = text_of(Table(caption="", head=("step",), rows=rows), "{} more").splitlines()
    assert last == "3 more"
    assert "more" not in text_of(Table(caption="", head=("step",), rows=rows[:MOST_ROWS]), "{} more")


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        (duration(0.00099996), "1.00 ms"),
        (duration(0.000999), "999 µs"),
        (duration(0.9996), "1.00 s"),
        (duration(1e-9), "0.00 µs"),
        (duration(0.0), "0 s"),
        (memory(2**20 - 1), "1.00 MiB"),
        (memory(100), "0.10 KiB"),
        (speed(9.999e8), "1.00 GB/s"),
    ],
)
def test_a_value_that_rounds_to_the_next_unit_is_in_that_unit(shown: str, words: str) -> None:
    assert shown == words


def test_the_names_of_parts_are_in_the_picture_of_devices() -> None:
    parts = [["encoder", "cuda:0", 2**20, "cuda", "given"], ["decoder", "cuda:0", 3 * 2**20, "cuda", "given"]]
    (section,) = layout_sections([{"what": "placement", "parts": parts}], ["host"], "en")
    assert section.chart is not None
    assert ">encoder</text>" in section.chart.svg
    assert "<title>decoder: 3.00 MiB</title>" in section.chart.svg
    assert [one["name"] for one in section.legend] == ["encoder", "decoder"]


def test_a_mesh_is_a_table_on_the_terminal_too() -> None:
    text = page_of_mesh("dp_shard=2,tp=2", None, "en").text
    assert "dp_shard  2     0, 2; 1, 3 (each within a host)" in text


def test_a_caption_that_repeats_the_heading_is_for_screen_readers_only() -> None:
    page = page_of_mesh("tp=2", None, "en").html
    assert '<caption class="same">' in page
    assert tabled("a", "Title", ("one",), [("1",)]).tables[0].caption == "Title"


def test_a_report_begins_with_its_key_numbers_and_shares() -> None:
    page = page_of(run_of(job(2, slow=1, more={DATA: 0.006})), "en")
    head, values, blank, caption, columns, *parts = page.text.splitlines()
    assert re.split("  +", head) == ["time per step", "samples/s", "waiting for other ranks", "total time"]
    step, samples, waiting, total = re.split("  +", values)
    assert (step[-3:], total[-2:], blank, caption) == (" ms", " s", "", "Where the time of a step goes")
    # 64 samples in a step of 21 ms; rank 0 waits for 6 of them, rank 1 for none.
    assert 2900 < float(samples.replace(",", "")) < 3200
    assert waiting == "14 %"
    assert columns.split() == ["share", "mean", "longest"]
    (data,) = [line for line in parts if line.startswith("data ")]
    assert data.endswith("ms (rank 1)")
    shown = dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", page.html))
    assert shown == dict(zip(re.split("  +", head), (step, samples, waiting, total), strict=True))
    assert re.search(r"forward \d+ %</li>", page.html)


def test_the_environment_names_ranks_only_where_they_differ() -> None:
    records = job(3)
    run = run_of(records)
    for record, name in zip(records, ("a", "b", "b"), strict=True):
        record.facts["hostname"] = name
    page = page_of(run, "en").html
    assert "a (rank 0); b (ranks 1-2)" in page
    assert '<th scope="row">backend</th><td class="text">gloo</td>' in page
