# SPDX-License-Identifier: Apache-2.0
"""Trees of lists, tuples, dicts and registered classes: torch's pytrees."""

from __future__ import annotations

from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = ["LOGGER", "TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]

LOGGER = "torch.utils._pytree"
"""The logger that reports classes registered twice."""
