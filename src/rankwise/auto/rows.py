# SPDX-License-Identifier: Apache-2.0
"""Which rows of a batch a rank computes, and the rows of all ranks as one tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from rankwise.data.shards import rank_slice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.replicate.random_numbers.sample_layout import SampleLayout


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


@dataclass(frozen=True, slots=True)
class OutputRows:
    """Where the rows lie in an output."""

    layout: SampleLayout
    """In the first batch: rows flattened with another dim, as in ``[batch * time, words]``, have its size."""
    order: tuple[int, ...]
    """The dims in the order of memory: numbers drawn like the output are drawn in this order."""

    def fitting(self, shape: Sequence[int], num: int) -> SampleLayout | None:
        """Return where ``num`` rows lie in an output of another batch, whose other dims may have other sizes."""
        layout = self.layout
        if len(shape) != len(self.order) or shape[layout.dim] % num:
            return None
        if layout.outer == 1 != layout.inner:
            layout = replace(layout, inner=shape[layout.dim] // num)
        elif layout.inner == 1 != layout.outer:
            layout = replace(layout, outer=shape[layout.dim] // num)
        return layout if layout.fits(shape, num) else None


def part_of(whole: torch.Tensor, rows: OutputRows, share: Share) -> torch.Tensor:
    """Return a rank's rows of an output, or of its gradient."""
    layout = rows.fitting(whole.shape, share.num_global) or rows.layout
    return layout.part(whole, share.num_global, share.start, share.num)


def joined(parts: Sequence[torch.Tensor], rows: OutputRows, share: Share) -> torch.Tensor:
    """Return the rows of all ranks as one new tensor.

    Args:
        parts: the rows, by rank.
        rows: where they lie in each part.
        share: of any rank.
    """
    dim = rows.layout.dim
    layouts = [rows.fitting(one.shape, share.of(rank).num) or rows.layout for rank, one in enumerate(parts)]
    shape = list(parts[0].shape)
    shape[dim] = layouts[0].outer * share.num_global * layouts[0].inner
    # Not a view of what cat() returns: autograd would forbid the script to change it in place.
    whole = torch.empty_permuted(shape, rows.order, dtype=parts[0].dtype, device=parts[0].device)
    unfolded = [
        one.detach().unflatten(dim, (at.outer, share.of(rank).num, at.inner))
        for rank, (one, at) in enumerate(zip(parts, layouts, strict=True))
    ]
    torch.cat(unfolded, dim + 1, out=whole.unflatten(dim, (layouts[0].outer, share.num_global, layouts[0].inner)))
    return whole
