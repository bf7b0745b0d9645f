# SPDX-License-Identifier: Apache-2.0
"""The memory of tensors, and kinds of tensors that only private names of torch identify."""

from __future__ import annotations

from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


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
