# SPDX-License-Identifier: Apache-2.0
"""Error feedback: what a step left out goes along with the next."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class ErrorFeedback:
    """What this rank has left out so far, per unit of its weight: steps may count differently.

    Args:
        like: what it remembers the rest of.
        shapes: of the gradients in it, one behind the other.
    """

    def __init__(self, like: torch.Tensor, shapes: Sequence[torch.Size]) -> None:
        self.left_out = torch.zeros_like(like)
        """[num_elements] of its channel."""
        self._lengths = [math.prod(shape) for shape in shapes]
        self._weight = 0.0
        self._absent: Sequence[int] = ()

    def pieces(self) -> Sequence[torch.Tensor]:
        """Return the part of each gradient in ``left_out``."""
        return self.left_out.split(self._lengths)

    def add_to(self, body: torch.Tensor, share: float, weight: float, absent: Sequence[int]) -> None:
        """Add what was left out before to what this rank gives: its body, or nothing with share 0.

        Args:
            body: [num_elements].
            share: what it counts.
            weight: of this rank.
            absent: gradients that this rank has none of, by number.
        """
        self._weight = weight
        self._absent = absent
        if share == 0.0:
            body.zero_()
        body.add_(self.left_out, alpha=weight)

    def leave_out(self, left: torch.Tensor, mean_weight: float, is_used: Callable[[int], bool]) -> None:
        """Note what of that has not been sent.

        Args:
            left: [num_elements].
            mean_weight: of all ranks. A rank of no weight keeps what it had, and may have left out some of a sum.
            is_used: whether any rank has a gradient, by number. Of one that none has, nobody takes what was sent.
        """
        unused = [number for number in self._absent if not is_used(number)]
        pieces = self.pieces() if unused else ()
        kept = [(pieces[number], pieces[number].clone()) for number in unused]
        if self._weight > 0:
            torch.div(left, self._weight, out=self.left_out)
        elif mean_weight > 0:
            self.left_out.add_(left, alpha=1.0 / mean_weight)
        # Or one overflow would be remembered for ever.
        self.left_out.nan_to_num_(0.0, 0.0, 0.0)
        for piece, before in kept:
            piece.copy_(before)


@runtime_checkable
class HasErrorFeedback(Protocol):
    """A lane with a memory."""

    feedback: ErrorFeedback
