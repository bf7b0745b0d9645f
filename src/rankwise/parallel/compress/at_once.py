# SPDX-License-Identifier: Apache-2.0
"""A lane for ways of compressing that are no sum of what ranks send: everything travels when backward has run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.parallel.compress.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.exchange.protocol import Exchange, LaneSize

    Travel = Callable[[torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    """Takes what this rank gives and the sum of the weights; returns the sum over ranks, and what this one left out."""


class AtOnceLane:
    """See :class:`rankwise.exchange.protocol.Lane`.

    Args:
        exchange: of its own, for one lane after the other.
        size: of the lane.
        travel: how gradients go.
        what: travels, in words.
    """

    def __init__(self, exchange: Exchange, size: LaneSize, travel: Travel, what: str) -> None:
        self._exchange = exchange
        self._travel = travel
        self._what = what
        self.body = torch.zeros(size.num_elements, dtype=size.dtype, device=size.device)
        self.result = torch.zeros_like(self.body)
        self._memory = Memory(self.body)
        self._told = torch.zeros(1 + size.num_flags, dtype=torch.float64)
        self._sums = self._told

    def can_claim(self) -> bool:
        """Return whether nothing is to be compared first."""
        return self._exchange.watch.check is None

    def claim(self) -> None:
        """Do nothing: the body is this rank's alone."""

    def factor(self, share: float) -> float:
        """Return the share: the sum is divided by the weights."""
        return share

    @torch.no_grad()
    def start(self, share: float, weight: float, absent: Sequence[int]) -> None:
        """Note what is to be sent."""
        self._memory.add_to(self.body, share, weight)
        self._told = torch.ones_like(self._told)
        self._told[0] = weight
        self._told[[1 + flag for flag in absent]] = 0.0

    @torch.no_grad()
    def finish(self) -> None:
        """Send it, and divide the sum."""
        self._sums = self._exchange.all_reduce(self._told, what=f"{self._what}: weights")
        weight = self.total()
        total, left = self._travel(self.body, weight)
        self._memory.leave_out(left)
        self.result.copy_(total).mul_(1.0 / weight if weight > 0 else 0.0)

    def total(self) -> float:
        """Return the sum of the weights."""
        return self._sums[0].item()

    def is_flag_set(self, flag: int) -> bool:
        """Return whether any rank has set a flag."""
        return bool(self._sums[1 + flag].item())
