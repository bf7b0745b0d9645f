# SPDX-License-Identifier: Apache-2.0
"""The unit in which ranks count the weights of a step: gradients do not overflow, and lose no bits, on their way."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rankwise.comm.backends.protocol import Exchange


class WeightUnit:
    """What a rank's step weighs, as far as steps have shown. float16 has no room for numbers of whatever unit."""

    def __init__(self, *, is_open: bool) -> None:
        """Start with a unit of one.

        Args:
            is_open: whether the first step must agree on a unit before it sends anything, which float16 needs.
        """
        self.size = 1.0
        self.scale = 1.0
        """What to multiply with what this step sends: one over the unit that it agreed on, or one."""
        self.is_open = is_open

    def agree(self, group: Exchange, own_weight: float, what: str) -> None:
        """Make what a rank's step weighs the unit of what is about to be sent.

        Called by: every rank of ``group``.

        Args:
            group: the ranks.
            own_weight: of this rank's step.
            what: travels, in words.
        """
        own = torch.tensor([own_weight], dtype=torch.float64)
        total = group.all_reduce(own, what=f"weights of {what}").item()
        if total > 0:
            self.scale = 1.0 / power_near(total / group.world_size)
            self.is_open = False

    def adjust(self, mean: float) -> None:
        """Take the mean weight of the ranks' last step, in units, for the next ones."""
        self.size = power_near(self.size * mean)
        self.scale = 1.0


def power_near(weight: float) -> float:
    """Return the power of two nearest to a weight."""
    # A power of two, by which multiplying rounds nothing: a step after a resume, whose unit is 1, or with float16
    # its own, is then the same bits as in the undisturbed run.
    return 2.0 ** round(math.log2(weight))
