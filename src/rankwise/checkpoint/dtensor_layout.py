# SPDX-License-Identifier: Apache-2.0
"""How a tensor lies on this rank: whole, a region of it, or on other ranks only.

Knows torch's DTensor and meta tensors, no file and no other rank.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, cast

from rankwise.checkpoint.manifest import Region, whole
from rankwise.errors import CheckpointError
from rankwise.torch_private.dtensor import own_part, shard_orders, split_factor
from rankwise.torch_private.tensors import memory_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.distributed.tensor import DTensor


def as_dtensor(value: object) -> DTensor | None:
    """Return ``value`` if it is a DTensor, without importing torch's DTensor module."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(value, module.DTensor):
        return cast("DTensor", value)
    return None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor in this rank's memory: all of it, or a region."""
    dtensor = as_dtensor(tensor)
    return tensor.detach() if dtensor is None else own_part(dtensor).detach()


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no memory on this rank."""
    return local(tensor).is_meta


def region_of(tensor: torch.Tensor, path: str) -> Region | None:
    """Return which region of a tensor lies on this rank; ``None`` if it holds none of it.

    Raises:
        CheckpointError: it is a DTensor without regions: partial sums that are not reduced yet, or strided shards.
            ``path``, its place in the state, names it.
    """
    if is_elsewhere(tensor):
        return None
    dtensor = as_dtensor(tensor)
    if dtensor is None:
        return whole(tuple(tensor.shape))
    shape, held = tuple(dtensor.shape), tuple(local(dtensor).shape)
    mesh: Any = dtensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    sizes = tuple(int(size) for size in mesh.shape)
    region = _region(shape, sizes, coordinate, _shard_orders(dtensor, sizes, path))
    if region.num_elements == local(dtensor).numel() == 0:
        return whole(shape) if math.prod(shape) == 0 else None
    if region.shape != held:
        raise _unknown(dtensor, path, f"this rank holds {list(held)}, where {list(region.shape)} was expected")
    return region


def _region(
    shape: tuple[int, ...], mesh_shape: Sequence[int], coordinate: Sequence[int], orders: Sequence[Sequence[int]]
) -> Region:
    """Return the region at a coordinate of a mesh; ``orders`` is as :func:`_shard_orders` returns it.

    Source: torch.chunk: pieces of ceil(size / count), the last ones shorter or empty.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, order in enumerate(orders):
        for mesh_dim in order:
            piece = -(-sizes[dim] // mesh_shape[mesh_dim])
            start = min(piece * coordinate[mesh_dim], sizes[dim])
            offsets[dim] += start
            sizes[dim] = min(piece, sizes[dim] - start)
    return Region(tuple(offsets), tuple(sizes))


def _shard_orders(dtensor: DTensor, mesh_shape: Sequence[int], path: str) -> list[list[int]]:
    """Return, per dimension of the tensor, the mesh dimensions that split it, in the order they did.

    ``fully_shard`` splits what tensor parallelism has already split, although its mesh dimension comes first; torch
    marks this by a ``_StridedShard`` whose factor is the number of pieces before.

    Source: torch.distributed.tensor._dtensor_spec.DTensorSpec, shard_order.
    """
    orders: list[list[int]] = [[] for _ in range(dtensor.ndim)]
    placements = cast("Sequence[Any]", dtensor.placements)
    for mesh_dim, placement in reversed(list(enumerate(placements))):
        if placement.is_replicate():
            continue
        if not hasattr(placement, "dim"):
            raise _unknown(dtensor, path, "its partial sums are not reduced yet")
        order = orders[placement.dim]
        before, place, factor = 1, 0, split_factor(placement)
        while before != factor and place < len(order):
            before *= mesh_shape[order[place]]
            place += 1
        if before != factor:
            raise _unknown(dtensor, path, "its shards are strided")
        order.insert(place, mesh_dim)
    for dim, mesh_dims in shard_orders(dtensor):
        orders[dim] = mesh_dims
    return orders


def _unknown(dtensor: DTensor, path: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be saved or loaded with its placements: {why}.",
        evidence=f"{list(dtensor.shape)} placed as {dtensor.placements} on {dtensor.device_mesh}",
        do="redistribute() it to Shard or Replicate placements first",
    )


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a value that two tensors share only if they are the same elements of the same memory."""
    memory = local(tensor)
    kind = (tensor.device, tensor.dtype, tensor.shape, memory.shape, memory.stride())
    if memory.is_meta or as_dtensor(tensor) is not None:
        # Without elements on this rank there is no address; torch's own record of the memory still is one.
        return (*kind, memory_key(memory), memory.storage_offset())
    return (*kind, memory.data_ptr(), memory.is_conj(), memory.is_neg())
