# SPDX-License-Identifier: Apache-2.0
"""Trees of tensors, one call for many tensors, their memory, and kinds that only private names of torch identify.

Trees are of lists, tuples, dicts and registered classes: torch's pytrees.
"""

from __future__ import annotations

from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "TREE_LOGGER",
    "TreeSpec",
    "can_take_data",
    "foreach_add_",
    "foreach_copy_",
    "foreach_div_",
    "foreach_mul_",
    "foreach_sub_",
    "foreach_zero_",
    "is_zero_tensor",
    "mark_as_parameter",
    "memory_key",
    "sparse_indices",
    "sparse_values",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "typed_storage",
    "untyped_storage_of",
]

TREE_LOGGER = "torch.utils._pytree"
"""The logger that reports classes registered twice."""

# One call for many tensors, in place. torch has no public form of these.
foreach_copy_ = torch._foreach_copy_
"""Copy each of the second list into its place in the first."""
foreach_zero_ = torch._foreach_zero_
"""Fill each with zeros."""
foreach_add_ = torch._foreach_add_
"""Add a list of tensors, each multiplied by ``alpha``."""
foreach_sub_ = torch._foreach_sub_
"""Subtract a list of tensors."""
foreach_mul_ = torch._foreach_mul_
"""Multiply each by a number."""
foreach_div_ = torch._foreach_div_
"""Divide each by a number."""


def memory_key(tensor: torch.Tensor) -> int:
    """Return the address of torch's record of a tensor's memory, which exists where there is no data pointer."""
    return tensor.untyped_storage()._cdata  # noqa: SLF001


untyped_storage_of: Callable[[torch.storage.TypedStorage], torch.UntypedStorage] = attrgetter("_untyped_storage")
"""Return the untyped storage within a typed one; the public way warns."""


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    """Return a typed storage over an untyped one; the public way warns."""
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


sparse_indices: Callable[[torch.Tensor], torch.Tensor] = methodcaller("_indices")
"""Return the indices of a sparse tensor that need not be coalesced."""
sparse_values: Callable[[torch.Tensor], torch.Tensor] = methodcaller("_values")
"""Return the values of a sparse tensor that need not be coalesced."""
is_zero_tensor: Callable[[torch.Tensor], bool] = methodcaller("_is_zerotensor")
"""Return whether a tensor represents zeros without having memory."""
can_take_data = torch._has_compatible_shallow_copy_type  # noqa: SLF001
"""Return whether ``old.data = new`` is possible, as ``nn.Module.to`` checks it."""


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Make ``isinstance(tensor, nn.Parameter)`` true for a tensor of another class."""
    tensor._is_param = True  # type: ignore[attr-defined] # noqa: SLF001
