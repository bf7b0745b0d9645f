# SPDX-License-Identifier: Apache-2.0
"""Several tensors as one, and back. Rarely needed: the GradManager packs by itself. Imported by users."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from rankwise import collectives
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.compat.megengine.distributed.groups import Group


def get_offsets(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return ``[begin0, end0, begin1, end1, ...]`` of tensors of these shapes, one after another."""
    offsets: list[int] = []
    end = 0
    for shape in shapes:
        begin, end = end, end + math.prod(shape)
        offsets += [begin, end]
    return offsets


def param_pack_concat(
    inps: Sequence[torch.Tensor], offsets: torch.Tensor | None = None, offsets_val: Sequence[int] | None = None
) -> torch.Tensor:
    """Return tensors of one dtype as one of one dimension.

    Args:
        inps: the tensors.
        offsets: nothing; MegEngine's kernel took them.
        offsets_val: where each is to lie, as :func:`get_offsets` returns it; nothing else is offered.

    Raises:
        ConfigurationError: ``offsets_val`` says something else.
    """
    _ = offsets
    if offsets_val is not None and list(offsets_val) != get_offsets([tensor.shape for tensor in inps]):
        raise ConfigurationError(
            "param_pack_concat puts tensors right behind one another only.",
            evidence=f"offsets_val is {list(offsets_val)}",
            do="pass get_offsets([tensor.shape for tensor in inps]), or leave it out",
        )
    return torch.cat([tensor.reshape(-1) for tensor in inps])


def param_pack_split(inp: torch.Tensor, offsets: Sequence[int], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return the pieces of a packed tensor.

    Args:
        inp: [n].
        offsets: ``[begin0, end0, begin1, end1, ...]``.
        shapes: of the pieces.
    """
    pairs = zip(offsets[::2], offsets[1::2], strict=True)
    return [inp[begin:end].reshape(tuple(shape)) for (begin, end), shape in zip(pairs, shapes, strict=True)]


def pack_allreduce_split(
    pack_list: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], group: Group, reduce_method: str
) -> list[torch.Tensor]:
    """Return tensors added up, or averaged, over the ranks of a group.

    Called by: every rank of ``group``, with the same shapes.

    Args:
        pack_list: of one dtype.
        shapes: of the results.
        group: the ranks.
        reduce_method: ``"sum"`` or ``"mean"``.

    Raises:
        ConfigurationError: there is no such ``reduce_method``.
        CollectiveMismatch, PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """
    total = collectives.all_reduce(param_pack_concat(pack_list), reduce_method, group=group.group)
    return param_pack_split(total, get_offsets(shapes), shapes)
