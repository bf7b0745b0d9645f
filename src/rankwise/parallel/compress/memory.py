# SPDX-License-Identifier: Apache-2.0
"""Error feedback: what a step left out goes along with the next."""

from __future__ import annotations

import torch


class Memory:
    """What this rank has left out so far, per unit of its weight: steps may count differently."""

    def __init__(self, like: torch.Tensor) -> None:
        self._left_out = torch.zeros_like(like)
        self._given = torch.zeros_like(like)
        self._weight = 0.0

    def give(self, body: torch.Tensor, share: float, weight: float) -> torch.Tensor:
        """Return what this rank is to give: its body, unless its share is 0, and what it has left out before."""
        self._weight = weight
        torch.mul(self._left_out, weight, out=self._given)
        if share != 0.0:
            self._given.add_(body)
        return self._given

    def leave_out(self, left: torch.Tensor) -> None:
        """Note what of that has not been sent."""
        if self._weight > 0:
            # Or one overflow would be remembered for ever.
            torch.div(left, self._weight, out=self._left_out).nan_to_num_(0.0, 0.0, 0.0)
