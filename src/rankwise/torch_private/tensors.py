# SPDX-License-Identifier: Apache-2.0
"""The memory of tensors, and kinds of tensors that only private names of torch identify."""

from __future__ import annotations

import torch


def memory_key(tensor: torch.Tensor) -> int:
    """Return the address of torch's record of a tensor's memory, which exists where there is no data pointer."""
    return tensor.untyped_storage()._cdata  # noqa: SLF001


def untyped_storage_of(storage: torch.storage.TypedStorage) -> torch.UntypedStorage:
    """Return the untyped storage within a typed one; the public way warns."""
    return storage._untyped_storage  # noqa: SLF001


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    """Return a typed storage over an untyped one; the public way warns."""
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def sparse_indices(tensor: torch.Tensor) -> torch.Tensor:
    """Return the indices of a sparse tensor that need not be coalesced."""
    return tensor._indices()  # noqa: SLF001


def sparse_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a sparse tensor that need not be coalesced."""
    return tensor._values()  # noqa: SLF001


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor represents zeros without having memory."""
    return tensor._is_zerotensor()  # noqa: SLF001


def can_take_data(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Return whether ``old.data = new`` is possible, as ``nn.Module.to`` checks it."""
    return torch._has_compatible_shallow_copy_type(old, new)  # noqa: SLF001


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Make ``isinstance(tensor, nn.Parameter)`` true for a tensor of another class."""
    tensor._is_param = True  # type: ignore[attr-defined] # noqa: SLF001
