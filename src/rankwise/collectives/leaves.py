# SPDX-License-Identifier: Apache-2.0
"""Values as the tensors in them: what is sent, and the words that ranks compare their calls by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils import _pytree as pytree

from rankwise.arrays import tensor_of

if TYPE_CHECKING:
    import torch


def flattened(value: object, name: str) -> tuple[list[object], list[torch.Tensor], pytree.TreeSpec]:
    """Return the leaves of a value, each as a tensor, and what puts leaves together again.

    Raises:
        ConfigurationError: there is something in it that cannot be sent.
    """
    leaves, spec = pytree.tree_flatten(value)
    other = "rankwise.broadcast_object()" if name == "broadcast" else "rankwise.all_gather_object()"
    return leaves, [tensor_of(leaf, name, other) for leaf in leaves], spec


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return what lies in memory as it is to be sent."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def dtype_word(tensor: torch.Tensor) -> str:
    """Return ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def kind(tensor: torch.Tensor) -> str:
    """Return ``float32[2, 3]``."""
    return f"{dtype_word(tensor)}{list(tensor.shape)}"


def kinds(tensors: list[torch.Tensor]) -> str:
    """Return the kinds of all, separated by commas."""
    return ", ".join(map(kind, tensors))
