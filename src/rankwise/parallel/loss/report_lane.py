# SPDX-License-Identifier: Apache-2.0
"""The lane of the ranks' reports: a few numbers of each rank in every step, which arrive added up. Used by on_ranks.

Ranks send one form whatever they have to report, so that what differs between them never decides what is sent.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import torch

from rankwise.exchange.protocol import LaneSize
from rankwise.parallel.loss.verdict import REPORT_LENGTH
from rankwise.parallel.state_guard.guard import NUM_NUMBERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.exchange.protocol import Exchange

_BATCHES = REPORT_LENGTH + NUM_NUMBERS
"""Where the numbers of the ranks' batches begin, after those of losses and guards."""
_NOTHING_OF_GUARD = (0.0,) * NUM_NUMBERS


def lane_length(num_ranks: int) -> int:
    """Return how many numbers travel with each step."""
    return _BATCHES + num_ranks


class Reports(NamedTuple):
    """What the ranks have reported."""

    losses: Sequence[float]
    """[REPORT_LENGTH], of all ranks together."""
    guards: Sequence[float]
    """[NUM_NUMBERS], of all ranks together."""
    batches: Sequence[float]
    """[num_ranks], of each rank."""


class ReportLane:
    """Takes one report of each rank in every step."""

    def __init__(self, group: Exchange, model_name: str) -> None:
        """Open the lane.

        Called by: every rank of ``group``, in the same order.

        Args:
            group: the ranks that train the model.
            model_name: for errors.
        """
        length = lane_length(group.world_size)
        size = LaneSize(length, 1, torch.float64, torch.device("cpu"))
        (self._lane,) = group.lanes([size], f"loss of {model_name}")
        self._rank = group.rank
        self._num_ranks = group.world_size
        # Several times as fast as tensors and arrays are for a few numbers.
        self._form = struct.Struct(f"={length}d")
        self._body = self._lane.body.numpy().data
        self._result = self._lane.result.numpy().data

    def send(self, loss: Sequence[float], guard: Sequence[float] | None, batch: int) -> None:
        """Send this rank's report. Called by: every rank, once per step.

        Args:
            loss: at most REPORT_LENGTH numbers, followed by zeros.
            guard: of the guard, where it compares.
            batch: number of this rank's batch.
        """
        batches = [0.0] * self._num_ranks
        batches[self._rank] = batch
        rest = [0.0] * (REPORT_LENGTH - len(loss))
        self._lane.claim()
        self._form.pack_into(self._body, 0, *loss, *rest, *(guard or _NOTHING_OF_GUARD), *batches)
        # As it is: a lane's mean of what was not divided by the number of ranks is the sum, to the last bit.
        self._lane.start(1.0, 1.0, ())

    def receive(self) -> Reports:
        """Wait for the reports of all ranks."""
        self._lane.finish()
        sums = self._form.unpack_from(self._result)
        return Reports(sums[:REPORT_LENGTH], sums[REPORT_LENGTH:_BATCHES], sums[_BATCHES:])
