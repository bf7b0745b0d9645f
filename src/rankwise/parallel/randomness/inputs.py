# SPDX-License-Identifier: Apache-2.0
"""Which samples a model is called with, and where they lie in its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.parallel.randomness.layout import Layout, layouts_of
from rankwise.torch_private import tree as pytree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.batch_in_hand import BatchInHand


def rows_in_hand(known: Sequence[BatchInHand], leaves: Sequence[torch.Tensor]) -> BatchInHand | None:
    """Return the samples that a model is called with: of the loader that gave them, or gave as many, or gave last."""
    if len(known) > 1:
        for is_it in (_is_of_batch, _is_as_long):
            for rows in reversed(known):
                if any(is_it(leaf, rows) for leaf in leaves):
                    return rows
    return known[-1] if known else None


def _is_of_batch(leaf: torch.Tensor, rows: BatchInHand) -> bool:
    return _dim_in_batch(leaf, rows) is not None


def _is_as_long(leaf: torch.Tensor, rows: BatchInHand) -> bool:
    return leaf.shape[0] == rows.num


def _dim_in_batch(leaf: torch.Tensor, rows: BatchInHand) -> int | None:
    """Return the dim of a view of what the loader gave that is the first one there."""
    for given in pytree.tree_leaves(rows.values):
        is_same = isinstance(given, torch.Tensor) and given.dim() > 0 and given.data_ptr() == leaf.data_ptr() != 0
        if is_same and given.shape[0] == rows.num:
            dims = [
                dim for dim in range(leaf.dim()) if leaf.stride(dim) == given.stride(0) and leaf.shape[dim] == rows.num
            ]
            return dims[0] if len(dims) == 1 else None
    return None


def input_layouts(leaf: torch.Tensor, rows: BatchInHand) -> list[Layout]:
    """Return how samples can lie in an input of a model, the likeliest first."""
    dim = _dim_in_batch(leaf, rows)
    if dim is not None:
        return [Layout(dim)]
    found = [one for one in layouts_of(leaf.shape, rows.num) if one.inner == 1]
    if rows.num > 0 and not found and leaf.shape[0] % rows.num == 0 and leaf.shape[0]:
        # Batches one after the other, as of real and generated samples.
        found.append(Layout(0, outer=leaf.shape[0] // rows.num))
    return found
