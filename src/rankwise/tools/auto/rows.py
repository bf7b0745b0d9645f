# SPDX-License-Identifier: Apache-2.0
"""Which rows of a batch a rank computes, and the rows of all ranks as one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rankwise.data.shards import rank_slice

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of one batch that a rank takes."""

    rank: int
    num_ranks: int
    num_global: int
    """Rows of the batch, at least one per rank."""

    @property
    def start(self) -> int:
        """The first row."""
        return rank_slice(0, self.num_global, self.rank, self.num_ranks)[0]

    @property
    def num(self) -> int:
        """How many rows."""
        first, end = rank_slice(0, self.num_global, self.rank, self.num_ranks)
        return end - first

    def of(self, rank: int) -> Share:
        """Return the share of another rank."""
        return Share(rank, self.num_ranks, self.num_global)

    def rows(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return these rows of a tensor."""
        return whole.narrow(dim, self.start, self.num)


def joined(parts: Sequence[torch.Tensor], dim: int, order: Sequence[int]) -> torch.Tensor:
    """Return the rows of all ranks along ``dim`` as one new tensor.

    Args:
        parts: the rows, by rank.
        dim: of the rows.
        order: the dims of the result in the order of memory, in which torch draws a tensor like it.
    """
    placed = [one.detach().permute(tuple(order)) for one in parts]
    back = [order.index(one) for one in range(len(order))]
    return torch.cat(placed, order.index(dim)).permute(back)
