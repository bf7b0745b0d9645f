# SPDX-License-Identifier: Apache-2.0
"""Pictures of meshes, as values."""

from __future__ import annotations

from rankwise.insight.layouts import layout_sections, mesh_section
from rankwise.world.mesh import Axes


def test_a_cell_has_the_coordinate_of_its_rank() -> None:
    axes = Axes(pp=2, dp_shard=3, tp=2)
    section = mesh_section(axes, ["a"] * 12, "en")
    chart = str(section.chart)
    for rank in range(12):
        for name in ("pp", "dp_shard", "tp"):
            assert f"<title>rank {rank}: {name} {axes.coordinate(rank, name)}</title>" in chart
    # One host: no row for it.
    assert chart.count("<rect") == 12 * 4
    assert [row[:2] for row in section.tables[0].rows] == [("pp", "2"), ("dp_shard", "3"), ("tp", "2")]


def test_more_ranks_than_cells_and_a_mesh_of_one_axis() -> None:
    section = mesh_section(Axes(dp_replicate=1000), [f"host {rank // 8}" for rank in range(1000)], "zh")
    assert str(section.chart).count("<rect") == 3 * 240


def test_times_of_a_schedule_are_those_that_were_measured() -> None:
    spans = [(0, "forward", 0, 0, 0.0, 0.25), (1, "backward", 1, 0, 0.5, 1.0)]
    (section,) = layout_sections([{"what": "schedule", "title": "1f1b", "spans": spans}], ["a", "a"], "en")
    assert section.tables[0].rows == (("rank 0", "250 ms", "750 ms"), ("rank 1", "500 ms", "500 ms"))
    boxes = str(section.chart)
    assert 'class="forward cell" x="90.0"' in boxes
    assert 'width="157.5"' in boxes  # A quarter of the width.
    assert 'class="backward cell" x="405.0"' in boxes


def test_groups_of_which_one_is_across_hosts_are_across_hosts() -> None:
    section = mesh_section(Axes(dp_replicate=3, tp=2), ["a"] * 3 + ["b"] * 3, "en")
    groups = {name: text for name, _, text, _ in section.tables[0].rows}
    assert groups == {
        "dp_replicate": "0, 2, 4; 1, 3, 5 (across hosts)",
        "tp": "0, 1; 2, 3; 4, 5 (across hosts)",
    }
    within = mesh_section(Axes(dp_replicate=3, tp=2), ["a", "a", "b", "b", "c", "c"], "en")
    assert within.tables[0].rows[1][2] == "0, 1; 2, 3; 4, 5 (each within a host)"
