# SPDX-License-Identifier: Apache-2.0
"""Error feedback: the compression error of a step is added to the gradients of the next."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class ErrorFeedback:
    """The compression error of this rank so far, per unit of its weight: steps may weigh differently.

    Args:
        like: the body of the channel.
        shapes: of the gradients in it, in order.
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
        """Add the earlier error to this rank's body, which counts as zero with share 0.

        Args:
            body: [num_elements].
            share: of the body.
            weight: of this rank.
            absent: numbers of the gradients that this rank does not have.
        """
        self._weight = weight
        self._absent = absent
        if share == 0.0:
            body.zero_()
        body.add_(self.left_out, alpha=weight)

    def leave_out(self, left: torch.Tensor, mean_weight: float, is_used: Callable[[int], bool]) -> None:
        """Note the new error.

        Args:
            left: [num_elements] not sent.
            mean_weight: of all ranks. A rank of weight zero keeps its error, and may add some from rounding a sum.
            is_used: whether any rank has a gradient, by number. The error of one that none has does not change.
        """
        unused = [number for number in self._absent if not is_used(number)]
        pieces = self.pieces() if unused else ()
        kept = [(pieces[number], pieces[number].clone()) for number in unused]
        if self._weight > 0:
            torch.div(left, self._weight, out=self.left_out)
        elif mean_weight > 0:
            self.left_out.add_(left, alpha=1.0 / mean_weight)
        # Otherwise one overflow would stay forever.
        self.left_out.nan_to_num_(0.0, 0.0, 0.0)
        for piece, before in kept:
            piece.copy_(before)


@runtime_checkable
class HasErrorFeedback(Protocol):
    """A channel with error feedback."""

    feedback: ErrorFeedback
