# SPDX-License-Identifier: Apache-2.0
"""Split calls of modules that do not do the same on every rank: the ranks still agree on what is split."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from rankwise.comm.session import current
from rankwise.tools.auto.calls import SplitCalls

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World

NUM_CALLS = 5
noted: list[int] = []


class NotesOnce(nn.Module):
    """Changes a global variable in the first call on one rank, as libraries do that warn once on rank zero."""

    def __init__(self, *, notes: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self._notes = notes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._notes and not noted:
            noted.append(1)
        return self.layer(x).tanh()


def _called(world: World, odd: int) -> int:
    exchange = current().exchange
    assert exchange is not None
    torch.manual_seed(0)
    model = NotesOnce(notes=world.rank == odd)
    batches = [torch.randn(6, 5) for _ in range(NUM_CALLS)]
    expected = [model.layer(batch).tanh() for batch in batches]
    noted.clear()
    with SplitCalls(current(), exchange, lambda: 0).replacing():
        found = [model(batch) for batch in batches]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    return len(found)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_reason_on_one_rank_is_that_of_all(run_ranks: RunRanks, odd: int) -> None:
    assert [result.get() for result in run_ranks(_called, 3, odd)] == [NUM_CALLS] * 3
