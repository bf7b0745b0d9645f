# SPDX-License-Identifier: Apache-2.0
"""Small tensors of one call travel together: a message takes about as long for a hundred numbers as for one."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

from rankwise.tensors.as_bytes import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

K = TypeVar("K", bound="Hashable")

SMALL_BYTES = 2**16
"""Up to this size a tensor is copied together with others."""


def sent_by_dtype(tensors: Sequence[torch.Tensor], send: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Return ``send`` of each of some contiguous tensors, where it computes element by element.

    Called by: every rank, with tensors of the same shapes and dtypes. Returns a new tensor for each, of its shape.
    """
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
