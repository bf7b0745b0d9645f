# SPDX-License-Identifier: Apache-2.0
"""Values as the tensors in them: what is sent, and the descriptions by which ranks compare their calls."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING

from rankwise.tensors.arrays import tensor_of
from rankwise.torch_private import tree as pytree

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


def flattened(value: object, name: str) -> tuple[list[object], list[torch.Tensor], pytree.TreeSpec]:
    """Return the leaves of a value, each as a tensor, and the structure to rebuild it.

    Raises:
        ConfigurationError: it contains something that cannot be sent.
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
    """Return ``{loss: float32[], parts: [int64[3], int64[2]]}``: the kinds of all, in their places."""
    return _in_tree(map(kind, tensors), spec)


def dtypes(tensors: list[torch.Tensor], spec: pytree.TreeSpec) -> str:
    """Return ``{loss: float32, parts: [int64, int64]}``: as :func:`kinds`, without the shapes."""
    return _in_tree(map(dtype_word, tensors), spec)


def _in_tree(words: Iterator[str], spec: pytree.TreeSpec) -> str:
    if spec.is_leaf():
        return next(words)
    parts = [_in_tree(words, child) for child in spec.children()]
    if spec.type not in {dict, OrderedDict, defaultdict}:
        return f"[{', '.join(parts)}]"
    # Leaves are in the order in which a dict was filled: with another order they would be mixed up.
    keys = spec.context[1] if spec.type is defaultdict else spec.context
    return f"{{{', '.join(f'{key}: {part}' for key, part in zip(keys, parts, strict=True))}}}"
