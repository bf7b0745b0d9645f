# SPDX-License-Identifier: Apache-2.0
"""Error feedback: what a step left out goes along with the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankwise.parallel.buckets import Bucket


class Memory:
    """What this rank has left out so far, per unit of its weight: steps may count differently."""

    def __init__(self, like: torch.Tensor) -> None:
        self.left_out = torch.zeros_like(like)
        """[num_elements] of its lane."""
        self._weight = 0.0

    def add_to(self, body: torch.Tensor, share: float, weight: float) -> None:
        """Add what was left out before to what this rank gives: its body, or nothing with share 0."""
        self._weight = weight
        if share == 0.0:
            body.zero_()
        body.add_(self.left_out, alpha=weight)

    def leave_out(self, left: torch.Tensor, mean_weight: float) -> None:
        """Note what of that has not been sent.

        Args:
            left: [num_elements].
            mean_weight: of all ranks. A rank of no weight keeps what it had, and may have left out some of a sum.
        """
        if self._weight > 0:
            torch.div(left, self._weight, out=self.left_out)
        elif mean_weight > 0:
            self.left_out.add_(left, alpha=1.0 / mean_weight)
        # Or one overflow would be remembered for ever.
        self.left_out.nan_to_num_(0.0, 0.0, 0.0)


@runtime_checkable
class Remembers(Protocol):
    """A lane with a memory."""

    memory: Memory


def carry_over(old: Iterable[Bucket], new: Iterable[Bucket]) -> None:
    """Have buckets that are laid out anew remember what the ones before did, parameter by parameter."""
    kept = {
        number: piece
        for bucket in old
        if isinstance(bucket.lane, Remembers)
        for number, piece in zip(bucket.numbers, bucket.pieces(bucket.lane.memory.left_out), strict=True)
    }
    for bucket in new:
        if isinstance(bucket.lane, Remembers):
            for number, piece in zip(bucket.numbers, bucket.pieces(bucket.lane.memory.left_out), strict=True):
                if number in kept:
                    piece.copy_(kept[number])
