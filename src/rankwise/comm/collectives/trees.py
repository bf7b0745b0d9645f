# SPDX-License-Identifier: Apache-2.0
"""Values as the tensors in them: what is sent, and the words that ranks compare their calls by."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING

from rankwise.tensors.arrays import tensor_of
from rankwise.torch_private import tree as pytree

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


def flattened(value: object, name: str) -> tuple[list[object], list[torch.Tensor], pytree.TreeSpec]:
    """Return the leaves of a value, each as a tensor, and what puts leaves together again.

    Raises:
        ConfigurationError: there is something in it that cannot be sent.
    """
    leaves, spec = pytree.tree_flatten(value)
    other = "rankwise.broadcast_object()" if name == "broadcast" else "rankwise.all_gather_object()"
    return leaves, [tensor_of(leaf, name, other) for leaf in leaves], spec


def dtype_word(tensor: torch.Tensor) -> str:
    """Return ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def kind(tensor: torch.Tensor) -> str:
    """Return ``float32[2, 3]``."""
    return f"{dtype_word(tensor)}{list(tensor.shape)}"


def kinds(tensors: list[torch.Tensor], spec: pytree.TreeSpec) -> str:
    """Return ``{loss: float32[], parts: [int64[3], int64[2]]}``: the kinds of all, where they are."""
    return _in_tree(map(kind, tensors), spec)


def dtypes(tensors: list[torch.Tensor], spec: pytree.TreeSpec) -> str:
    """Return ``{loss: float32, parts: [int64, int64]}``: as :func:`kinds`, in whatever shapes."""
    return _in_tree(map(dtype_word, tensors), spec)


def _in_tree(words: Iterator[str], spec: pytree.TreeSpec) -> str:
    if spec.is_leaf():
        return next(words)
    parts = [_in_tree(words, child) for child in spec.children()]
    if spec.type not in {dict, OrderedDict, defaultdict}:
        return f"[{', '.join(parts)}]"
    # Leaves come in the order in which a dict was filled: with another one they would be taken for one another.
    keys = spec.context[1] if spec.type is defaultdict else spec.context
    return f"{{{', '.join(f'{key}: {part}' for key, part in zip(keys, parts, strict=True))}}}"
