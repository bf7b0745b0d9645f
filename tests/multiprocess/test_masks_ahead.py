# SPDX-License-Identifier: Apache-2.0
"""Dropout's small masks, drawn at once when a forward pass begins: the same numbers as drawn one by one."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise import testing
from rankwise.replicate.random_numbers import kernels

if TYPE_CHECKING:
    from rankwise.world.facts import World

NUM_LAYERS = 5
WIDTHS = (8, 8, 8, 8, 6, 8, 8, 8)
"""Of the batches: a mask of another width is not the one that was expected."""


class _Scale(nn.Module):
    """What there is to train."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def _masks(_: World, most: int, batch: int) -> tuple[torch.Tensor, list[int]]:
    """Return how often each element was kept and where, and how many masks were drawn ahead in each step."""
    torch.manual_seed(0)
    kernels.MOST_AHEAD = most
    layers = nn.Sequential(*(nn.Dropout(0.3) for _ in range(NUM_LAYERS)), _Scale())
    model, seen, counts = rw.replicate(layers), [], []
    draw_ahead = kernels.masks_ahead

    def counting(*args: object) -> dict[object, torch.Tensor]:
        drawn = draw_ahead(*args)  # type: ignore[arg-type]
        counts[-1] += len(drawn)
        return drawn  # type: ignore[return-value]

    kernels.masks_ahead = counting  # type: ignore[assignment]
    loader = rw.DataLoader(torch.ones(len(WIDTHS) * batch, max(WIDTHS)), global_batch_size=batch)
    for number, (x, width) in enumerate(zip(loader, WIDTHS, strict=True)):
        counts.append(0)
        if number == 6:  # as schedules of dropout do, in one layer only
            layers[2].p = 0.6  # type: ignore[assignment]
        seen.append(model(x[:, :width]).detach().reshape(-1))
    return torch.cat(seen), counts


@pytest.mark.parametrize("world_size", [1, 2])
def test_masks_drawn_ahead_are_those_drawn_one_by_one(world_size: int) -> None:
    together = [one.get() for one in testing.run_ranks(_masks, world_size, 2**22, 7)]
    for (drawn, _), one in zip(together, testing.run_ranks(_masks, world_size, 0, 7), strict=True):
        one_by_one, counts = one.get()
        assert torch.equal(drawn, one_by_one)
        assert not any(counts)


def test_masks_are_drawn_ahead_where_the_pass_before_drew_such() -> None:
    ((drawn, counts),) = (one.get() for one in testing.run_ranks(_masks, 1, 2**22, 7))
    # The first pass is followed; the second has seen no masks; the fifth and sixth have other widths than those before.
    assert [count // NUM_LAYERS for count in counts] == [0, 0, 1, 1, 0, 0, 1, 1]
    passes = drawn.split([7 * width for width in WIDTHS])
    assert all(len(left) != len(right) or not torch.equal(left, right) for left, right in pairwise(passes))


def test_large_masks_are_drawn_when_they_are_needed() -> None:
    ((_, counts),) = (one.get() for one in testing.run_ranks(_masks, 1, 2**22, 2**14))
    assert not any(counts)
    ((_, counts),) = (one.get() for one in testing.run_ranks(_masks, 1, 7 * 8 * 2, 7))
    assert counts[2:4] == [2, 2]
