# SPDX-License-Identifier: Apache-2.0
"""Error feedback: what a step left out goes along with the next."""

from __future__ import annotations

import torch


class Memory:
    """What this rank has left out so far, per unit of its weight: steps may count differently."""

    def __init__(self, like: torch.Tensor) -> None:
        self._left_out = torch.zeros_like(like)
        self._weight = 0.0

    def add_to(self, body: torch.Tensor, share: float, weight: float) -> None:
        """Add what was left out before to what this rank gives: its body, or nothing with share 0."""
        self._weight = weight
        if share == 0.0:
            body.zero_()
        body.add_(self._left_out, alpha=weight)

    def leave_out(self, left: torch.Tensor) -> None:
        """Note what of that has not been sent."""
        if self._weight > 0:
            # Or one overflow would be remembered for ever.
            torch.div(left, self._weight, out=self._left_out).nan_to_num_(0.0, 0.0, 0.0)
