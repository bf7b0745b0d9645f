# SPDX-License-Identifier: Apache-2.0
"""The rows of all ranks are one tensor, and a rank's part of it is its rows: whatever the dims' sizes and order."""

from __future__ import annotations

import pytest
import torch

from rankwise.auto.rows import OutputRows, Share, joined, part_of
from rankwise.replicate.random_numbers.sample_layout import SampleLayout

FORMS = {
    "first dim": (lambda x: x, OutputRows(SampleLayout(0), (0, 1, 2))),
    "second dim": (lambda x: x.transpose(0, 1).contiguous(), OutputRows(SampleLayout(1), (0, 1, 2))),
    "second dim of a view": (lambda x: x.transpose(0, 1), OutputRows(SampleLayout(1), (1, 0, 2))),
    "last in memory": (lambda x: x.movedim(1, 0).contiguous().movedim(0, 1), OutputRows(SampleLayout(0), (1, 0, 2))),
    "with an inner dim": (lambda x: x.flatten(0, 1), OutputRows(SampleLayout(0, inner=4), (0, 1))),
    "with an outer dim": (lambda x: x.transpose(0, 1).flatten(0, 1), OutputRows(SampleLayout(0, outer=4), (0, 1))),
    "last of both": (lambda x: x.permute(2, 0, 1).flatten(1, 2), OutputRows(SampleLayout(1, inner=4), (0, 1))),
}
"""What makes an output of ``[rows, 4, 3]``, and where its rows are then."""


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("middle", [4, 2, 5], ids=["as proved", "shorter", "longer"])
@pytest.mark.parametrize("name", FORMS)
def test_the_rows_of_all_ranks_are_the_whole(name: str, middle: int, num_ranks: int) -> None:
    form, rows = FORMS[name]
    x = torch.arange(7.0 * middle * 3).view(7, middle, 3)
    share = Share(0, num_ranks, 7)
    parts = [form(share.of(rank).rows(x, 0)) for rank in range(num_ranks)]
    whole = joined(parts, rows, share)
    assert torch.equal(whole, form(x))
    for rank in range(num_ranks):
        assert torch.equal(part_of(whole, rows, share.of(rank)), parts[rank])
    order = sorted(range(whole.dim()), key=lambda dim: -whole.stride(dim))
    assert tuple(order) == rows.order
    whole.requires_grad_(False).mul_(2)  # it is nobody else's
    assert torch.equal(x, torch.arange(7.0 * middle * 3).view(7, middle, 3))


@pytest.mark.parametrize("shape", [(9, 3), (7,), (7, 2, 3)], ids=["not divided", "a dim less", "a dim more"])
def test_an_output_without_its_rows_fits_nothing(shape: tuple[int, ...]) -> None:
    assert OutputRows(SampleLayout(0, inner=4), (0, 1)).fitting(shape, 7) is None


def test_other_sizes_are_taken_as_the_other_dims() -> None:
    assert OutputRows(SampleLayout(0, inner=4), (0, 1)).fitting((21, 3), 7) == SampleLayout(0, inner=3)
    assert OutputRows(SampleLayout(0, outer=4), (0, 1)).fitting((35, 3), 7) == SampleLayout(0, outer=5)
    assert OutputRows(SampleLayout(0), (0, 1)).fitting((7, 9), 7) == SampleLayout(0)
    # Only one of two dims may be another: which, cannot be told.
    assert OutputRows(SampleLayout(0, outer=2, inner=3), (0, 1)).fitting((56, 3), 7) is None
    assert OutputRows(SampleLayout(0), (0, 1)).fitting((14, 9), 7) is None
