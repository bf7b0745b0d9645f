# SPDX-License-Identifier: Apache-2.0
"""Values as the tensors in them: what is sent, and the descriptions by which ranks compare their calls.

Small tensors of one call travel together: a message takes about as long for a hundred numbers as for one.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, TypeVar

import torch

from rankwise.tensors.arrays import bytes_of, tensor_of
from rankwise.torch_private import tree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence


K = TypeVar("K", bound="Hashable")

SMALL_BYTES = 2**16
"""Up to this size a tensor is copied together with others."""


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
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


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


def sent_by_dtype(tensors: Sequence[torch.Tensor], send: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Return ``send`` of each of some contiguous tensors, where it computes element by element.

    Called by: every rank, with tensors of the same shapes and dtypes. Returns a new tensor for each, of its shape.
    """
    if len(tensors) == 1:
        return [send(tensors[0])]
    results: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
    for places in _packs(tensors, [(tensor.device, tensor.dtype) for tensor in tensors]):
        if len(places) == 1:
            results[places[0]] = send(tensors[places[0]])
            continue
        whole = send(torch.cat([tensors[place].reshape(-1) for place in places]))
        pieces = whole.split([tensors[place].numel() for place in places])
        for place, piece in zip(places, pieces, strict=True):
            # Of its own: in memory of all, a saved leaf would be as large as all of them.
            results[place] = piece.clone().view(tensors[place].shape)
    return results


def sent_as_bytes(
    tensors: Sequence[torch.Tensor], send: Callable[[torch.Tensor], torch.Tensor], num_rows: int
) -> list[torch.Tensor]:
    """Return ``send`` of each of some contiguous tensors, where it moves them: [num_rows, *shape] each.

    Called by: every rank, with tensors of the same shapes and dtypes.
    """
    results: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
    for places in _packs(tensors, [tensor.device for tensor in tensors]):
        if len(places) == 1:
            results[places[0]] = send(tensors[places[0]])
            continue
        whole = send(torch.cat([bytes_of(tensors[place]) for place in places])).view(num_rows, -1)
        pieces = whole.split([tensors[place].nbytes for place in places], dim=1)
        for place, piece in zip(places, pieces, strict=True):
            like = tensors[place]
            # A copy is aligned for its dtype.
            results[place] = (
                piece.clone(memory_format=torch.contiguous_format).view(like.dtype).view(num_rows, *like.shape)
            )
    return results


def _packs(tensors: Sequence[torch.Tensor], keys: Sequence[K]) -> list[list[int]]:
    """Return the positions of tensors that travel together: small ones with the same key."""
    packs: list[list[int]] = []
    open_of: dict[K, list[int]] = {}
    for place, (tensor, key) in enumerate(zip(tensors, keys, strict=True)):
        if tensor.nbytes > SMALL_BYTES or not tensor.numel():
            packs.append([place])
        elif key in open_of:
            open_of[key].append(place)
        else:
            packs.append(open_of.setdefault(key, [place]))
    return packs
