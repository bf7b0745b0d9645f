# SPDX-License-Identifier: Apache-2.0
"""What the gradients of one rank count in the mean over ranks, and the unit in which that is sent.

Values for ``gradient_buckets``; each strategy decides which.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rankwise.comm.backends.protocol import Amount, Exchange


@dataclass(frozen=True, slots=True)
class Weights:
    """What one rank's gradients count: each becomes ``sum_r share_r g_r / sum_r weight_r``.

    For the mean over samples both are this rank's number of samples, for the mean over n ranks both are 1, and for
    their sum a share of 1 goes with a weight of 1/n.
    """

    share: Amount
    """The factor for this rank's gradients; with 0 nothing of them counts, not even a NaN."""
    weight: Amount
    """This rank's part of the divisor of the sum."""


class WeightUnit:
    """The unit in which ranks count the weights of a step, so that gradients neither overflow nor lose bits.

    It follows the mean weight of earlier steps. float16 has no room for weights in an arbitrary unit.
    """

    def __init__(self, *, is_open: bool) -> None:
        """Start with a unit of one.

        Args:
            is_open: whether the first step must agree on a unit before it sends anything, which float16 needs.
        """
        self.size = 1.0
        self.scale = 1.0
        """The factor for everything that this step sends: one over the unit that it agreed on, or one."""
        self.is_open = is_open

    def agree(self, group: Exchange, own_weight: Amount, what: str) -> None:
        """Make the mean weight of the ranks' step the unit of the next send.

        Called by: every rank of ``group``.

        Args:
            group: the ranks.
            own_weight: of this rank's step.
            what: the name of the values that are sent.
        """
        own = torch.tensor([float(own_weight)], dtype=torch.float64)
        total = group.all_reduce(own, what=f"weights of {what}").item()
        if total > 0:
            self.scale = 1.0 / power_near(total / group.world_size)
            self.is_open = False

    def adjust(self, mean: float) -> None:
        """Use the mean weight of the ranks' last step, in units, for the next steps."""
        self.size = power_near(self.size * mean)
        self.scale = 1.0


def power_near(weight: float) -> float:
    """Return the power of two nearest to a weight."""
    # Multiplying by a power of two rounds nothing. So a step after a resume, whose unit is 1, or a float16 step, which
    # has its own, computes the same bits as in the undisturbed run.
    return 2.0 ** round(math.log2(weight))
