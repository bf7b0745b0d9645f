# SPDX-License-Identifier: Apache-2.0
"""What ranks hold together: regions that make up tensors, entries that make up a state, and what does neither."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rankwise.checkpoint import layouts
from rankwise.checkpoint.layouts import Reports, StateReport, layouts_of, report_of, united_entries
from rankwise.checkpoint.manifest import Region, tiles
from rankwise.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence


def _all(reports: Sequence[StateReport]) -> Reports:
    return Reports(range(len(reports)), dict(enumerate(reports)))


def _report(region: Region | None, dtype: str = "float32", **more: Any) -> StateReport:
    return StateReport(tensors={"w": (dtype, (5, 4), region)}, entries={}, elsewhere={}, **more)


TOP, REST, LEFT = Region((0, 0), (2, 4)), Region((2, 0), (3, 4)), Region((0, 0), (5, 2))
WHOLE = Region((0, 0), (5, 4))


@pytest.mark.parametrize(
    ("regions", "expected"),
    [
        ([TOP, REST, TOP, REST], {TOP: [0, 2], REST: [1, 3]}),
        ([None, WHOLE, None, WHOLE], {WHOLE: [1, 3]}),
        ([TOP, WHOLE], {WHOLE: [1]}),
        ([None, TOP, REST], {TOP: [1], REST: [2]}),
    ],
)
def test_regions_that_make_up_a_tensor_are_found(
    regions: Sequence[Region | None], expected: dict[Region, list[int]]
) -> None:
    reports = [report_of(json.loads(json.dumps(_report(region)))) for region in regions]
    assert reports == [_report(region) for region in regions]
    assert layouts_of(_all(reports))["w"].holders == expected


@pytest.mark.parametrize(
    ("reports", "text"),
    [
        ([_report(None), _report(None)], "w cannot be saved: it is on the meta device on every rank"),
        ([_report(TOP), _report(TOP)], r"(?s)do not cover all of float32\[5, 4\].*ranks 0-1: \[0:2,0:4\]"),
        ([_report(TOP), _report(REST), _report(LEFT)], "do not cover"),
        ([_report(TOP), _report(REST, "float64")], r"(?s)differs between ranks: w\..*rank 1: float64\[5, 4\]"),
    ],
)
def test_regions_that_do_not_match_are_an_error(reports: list[StateReport], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        layouts_of(_all(reports))


def _entries(elsewhere: list[int], *entries: list[Any]) -> StateReport:
    return StateReport(tensors={}, entries={"o": list(entries)}, elsewhere={"o": elsewhere})


def test_the_entries_of_a_state_come_from_where_their_parameters_are() -> None:
    united = united_entries("o", _all([_entries([1], [0, {"a": 1}]), _entries([0], [1, {"b": 2}])]))
    assert united == [[0, {"a": 1}], [1, {"b": 2}]]
    # Parameter 2 never had a gradient, anywhere.
    assert united_entries("o", _all([_entries([2]), _entries([])])) == []


@pytest.mark.parametrize(
    ("reports", "evidence"),
    [
        ([_entries([], [0, 1]), _entries([])], "rank 1: absent"),
        ([_entries([1], [0, 1]), _entries([1], [0, 2]), _entries([0])], "rank 0: 1\n +rank 1: 2"),
    ],
)
def test_an_entry_that_one_rank_lacks_or_has_otherwise_is_an_error(reports: list[StateReport], evidence: str) -> None:
    with pytest.raises(CheckpointError, match=rf"(?s)differs between ranks: o\.state\[0\].*{evidence}"):
        united_entries("o", _all(reports))


@pytest.mark.parametrize("shape", [(7, 3), (1, 1), (2, 9), (12, 5)])
@pytest.mark.parametrize("orders", [[[0], [1]], [[1, 0], []], [[0, 1], []], [[], [1, 0]]])
@pytest.mark.parametrize("mesh_shape", [(3, 2), (2, 4), (1, 5)])
def test_the_regions_of_a_mesh_make_up_the_tensor(
    shape: tuple[int, int], orders: list[list[int]], mesh_shape: tuple[int, int]
) -> None:
    tensor = torch.arange(shape[0] * shape[1]).view(shape)
    regions: list[Region] = []
    for coordinate in itertools.product(*map(range, mesh_shape)):
        region = layouts._region(shape, mesh_shape, coordinate, orders)
        expected = tensor
        for dim, order in enumerate(orders):
            for mesh_dim in order:
                chunks = expected.chunk(mesh_shape[mesh_dim], dim)
                number = coordinate[mesh_dim]
                expected = chunks[number] if number < len(chunks) else expected.narrow(dim, 0, 0)
        found = tensor[tuple(slice(o, o + n) for o, n in zip(region.offsets, region.shape, strict=True))]
        assert torch.equal(found, expected)
        if region.num_elements:
            regions.append(region)
    assert tiles(regions, shape)
