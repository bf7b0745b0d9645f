# SPDX-License-Identifier: Apache-2.0
"""Lanes for ways of compressing that are no sum of what ranks send: all travel together when backward has run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from rankwise.exchange.bytes_of import bytes_of
from rankwise.parallel.compress.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.exchange.protocol import Exchange, LaneSize

WEIGHT_BYTES = 8


class Way(Protocol):
    """How gradients of several lanes go."""

    def __call__(self, told: torch.Tensor, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Send what this rank gives, all lanes at a time.

        Args:
            told: [n] bytes, for every rank.
            given: of each lane. What is left out stays in it.

        Returns:
            What every rank told [world_size, n], and the sum over ranks of each lane: the same bits on every rank, also
            where their processors differ.
        """
        ...


class Journey:
    """What the lanes of one device have in common: they travel when the first of them is waited for."""

    def __init__(self, exchange: Exchange, way: Way) -> None:
        self.exchange = exchange
        self.lanes: list[AtOnceLane] = []
        self.weight = 0.0
        """Of this rank; then of all."""
        self._way = way
        self._is_over = False

    def prepare(self, weight: float) -> None:
        """Begin a step."""
        self._is_over = False
        self.weight = weight

    def travel(self) -> None:
        """Send everything of all lanes, and divide the sums, once in a step."""
        if self._is_over:
            return
        weight = torch.tensor([self.weight], dtype=torch.float64)
        told = torch.cat([bytes_of(weight), *[lane.flags for lane in self.lanes]])
        bodies = [lane.body for lane in self.lanes]
        all_told, sums = self._way(told.to(bodies[0].device), bodies)
        rows = all_told.cpu()
        weights = rows[:, :WEIGHT_BYTES].clone(memory_format=torch.contiguous_format)
        # In one order on every processor.
        self.weight = sum(weights.view(torch.float64)[:, 0].tolist())
        flags = rows[:, WEIGHT_BYTES:].amax(0).split([len(lane.flags) for lane in self.lanes])
        for lane, total, of_lane in zip(self.lanes, sums, flags, strict=True):
            lane.arrive(total, self.weight, of_lane)
        self._is_over = True


class AtOnceLane:
    """See :class:`rankwise.exchange.protocol.Lane`.

    Args:
        journey: on which it goes.
        size: of the lane.
        shapes: of the gradients in it, one behind the other.
    """

    def __init__(self, journey: Journey, size: LaneSize, shapes: Sequence[torch.Size]) -> None:
        self._journey = journey
        self.body = self.result = torch.zeros(size.num_elements, dtype=size.dtype, device=size.device)
        self.memory = Memory(self.body, shapes)
        self.flags = torch.ones(size.num_flags, dtype=torch.uint8)
        journey.lanes.append(self)

    def can_claim(self) -> bool:
        """Return whether nothing is to be compared first."""
        return self._journey.exchange.watch.check is None

    def claim(self) -> None:
        """Do nothing: the body is this rank's alone."""

    def factor(self, share: float) -> float:
        """Return the share: the sum is divided by the weights."""
        return share

    @torch.no_grad()
    def start(self, share: float, weight: float, absent: Sequence[int]) -> None:
        """Note what is to be sent."""
        self._journey.prepare(weight)
        self.memory.add_to(self.body, share, weight, absent)
        self.flags = torch.ones_like(self.flags)
        self.flags[list(absent)] = 0

    @torch.no_grad()
    def finish(self) -> None:
        """Travel with the others."""
        self._journey.travel()

    def arrive(self, total: torch.Tensor, weight: float, flags: torch.Tensor) -> None:
        """Remember what the body has left, and put the mean in its place."""
        self.flags = flags
        self.memory.leave_out(self.body, weight / self._journey.exchange.world_size, self.is_flag_set)
        torch.mul(total, 1.0 / weight if weight > 0 else 0.0, out=self.result)

    def total(self) -> float:
        """Return the sum of the weights."""
        return self._journey.weight

    def is_flag_set(self, flag: int) -> bool:
        """Return whether any rank has set a flag."""
        return bool(self.flags[flag].item())
