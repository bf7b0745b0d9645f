# SPDX-License-Identifier: Apache-2.0
"""How tensors lie: on this rank whole, in a region or not at all; and, from the reports of all ranks, over all of them.

Knows torch's DTensor and meta tensors. Reads no file, and asks no other rank.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from rankwise.checkpoint.manifest import Region, tiles, whole
from rankwise.errors import CheckpointError, fold_ranks, fold_values
from rankwise.torch_private.dtensor import own_part, shard_orders, split_factor
from rankwise.torch_private.tensors import memory_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.tensor import DTensor

_NOTHING_WRITTEN = "nothing was written"


def as_dtensor(value: object) -> DTensor | None:
    """Return ``value`` if it is a DTensor, without importing torch's DTensor module."""
    module = sys.modules.get("torch.distributed.tensor")
    return cast("DTensor", value) if module is not None and isinstance(value, module.DTensor) else None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor in this rank's memory: all of it, or a region."""
    return own_part(tensor).detach()


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no memory on this rank."""
    return own_part(tensor).is_meta


def region_of(tensor: torch.Tensor, path: str) -> Region | None:
    """Return which region of a tensor lies on this rank; ``None`` if it holds none of it.

    Raises:
        CheckpointError: it is a DTensor without regions: partial sums that are not reduced yet, or strided shards.
            ``path``, its place in the state, names it.
    """
    dtensor = None if type(tensor) is torch.Tensor else as_dtensor(tensor)
    if dtensor is None:
        return None if tensor.is_meta else Region((0,) * tensor.ndim, tuple(tensor.shape))
    if is_elsewhere(dtensor):
        return None
    shape, held = tuple(dtensor.shape), tuple(local(dtensor).shape)
    mesh: Any = dtensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    sizes = tuple(int(size) for size in mesh.shape)
    region = _region(shape, sizes, coordinate, _shard_orders(dtensor, sizes, path))
    if 0 in region.shape and 0 in held:
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
    memory = tensor if type(tensor) is torch.Tensor else local(tensor)
    kind = (tensor.device, tensor.dtype, tensor.shape, memory.shape, memory.stride())
    if memory.is_meta or (memory is not tensor and as_dtensor(tensor) is not None):
        # Without elements on this rank there is no address; torch's own record of the memory still is one.
        return (*kind, memory_key(memory), memory.storage_offset())
    return (*kind, memory.data_ptr(), memory.is_conj(), memory.is_neg())


# -- over all ranks ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """One tensor over all ranks."""

    dtype: str
    """As torch names it, without ``torch.``."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    holders: Mapping[Region, Sequence[int]]
    """Regions that cover it, and the ranks that hold each."""


class StateReport(NamedTuple):
    """One rank's report of its state, which is sent to the others as JSON."""

    tensors: dict[str, tuple[str, tuple[int, ...], Region | None]]
    """Dtype, whole shape, and the region that lies here, by name."""
    entries: dict[str, list[Any]]
    """Entries of each optimizer's state that lie here: keys and skeletons."""
    elsewhere: dict[str, list[int]]
    """Numbers of each optimizer's parameters that lie on other ranks only."""


def report_of(sections: list[Any]) -> StateReport:
    """Return the report of another rank, which came as JSON."""
    tensors, entries, elsewhere = sections
    known = {
        name: (dtype, tuple(shape), Region(*map(tuple, held)) if held else None)
        for name, (dtype, shape, held) in tensors.items()
    }
    return StateReport(known, entries, elsewhere)


class Reports:
    """The reports of all ranks that count. Ranks whose reports are equal share one, as all replicas of a shard do."""

    def __init__(self, of_rank: Sequence[int], distinct: Mapping[int, StateReport]) -> None:
        """Take, for each rank, the first rank with an equal report; and the reports of those."""
        self.distinct = distinct
        self.ranks_of: dict[int, list[int]] = {}
        """The ranks that share the report of each of these."""
        for rank, first in enumerate(of_rank):
            self.ranks_of.setdefault(first, []).append(rank)

    def by_rank(self, texts: Mapping[int, str]) -> dict[int, str]:
        """Return a text for each rank, from one for each distinct report."""
        return dict(sorted((rank, text) for first, text in texts.items() for rank in self.ranks_of[first]))


def layouts_of(reports: Reports) -> dict[str, TensorLayout]:
    """Return how each tensor lies on the ranks.

    Raises:
        CheckpointError: ranks disagree about a tensor, or part of one lies on no rank.
    """
    firsts: dict[str, list[int]] = {}
    for first, report in reports.distinct.items():
        for name in report.tensors:
            firsts.setdefault(name, []).append(first)
    return {name: _layout(name, having, reports) for name, having in firsts.items()}


def _layout(name: str, firsts: Sequence[int], reports: Reports) -> TensorLayout:
    reported = {first: reports.distinct[first].tensors[name] for first in firsts}
    texts = {first: f"{dtype}{list(shape)}" for first, (dtype, shape, _) in reported.items()}
    if len(set(texts.values())) > 1:
        raise differs(name, reports.by_rank(texts))
    dtype, shape, _ = reported[firsts[0]]
    holders: dict[Region, list[int]] = {}
    for first, (_, _, region) in reported.items():
        if region is not None:
            holders.setdefault(region, []).extend(reports.ranks_of[first])
    everything = whole(shape)
    if everything in holders:
        return TensorLayout(dtype=dtype, shape=shape, holders={everything: sorted(holders[everything])})
    if not tiles(list(holders), shape):
        raise _incomplete(name, reports.by_rank(texts), holders)
    return TensorLayout(dtype=dtype, shape=shape, holders={region: sorted(ranks) for region, ranks in holders.items()})


def _incomplete(name: str, texts: Mapping[int, str], holders: Mapping[Region, Sequence[int]]) -> CheckpointError:
    if not holders:
        return CheckpointError(
            f"{name} cannot be saved: it is on the meta device on every rank.",
            evidence=f"{fold_values(texts)}\n{_NOTHING_WRITTEN}",
            do="allocate and fill the model first: model.to_empty(device=...), then load or initialise it",
        )
    found = "\n".join(
        f"{fold_ranks(ranks)}: [{bounds(region)}]"
        for region, ranks in sorted(holders.items(), key=lambda item: item[0].offsets)
    )
    return CheckpointError(
        f"{name} cannot be saved: the regions on the ranks do not cover all of {min(texts.items())[1]}.",
        evidence=f"{found}\n{_NOTHING_WRITTEN}",
        do="place it the same way on every rank, so that each element lies in one region",
    )


def on_no_rank(elsewhere: Sequence[Sequence[str]]) -> list[str]:
    """Return the tensors that all ranks report to lie elsewhere."""
    common = set[str].intersection(*map(set, elsewhere))
    return [name for name in elsewhere[0] if name in common]


def bounds(region: Region) -> str:
    """Return a region as slices: ``0:5,2:4``."""
    return ",".join(f"{start}:{start + size}" for start, size in zip(region.offsets, region.shape, strict=True))


def united_entries(name: str, reports: Reports) -> list[Any]:
    """Return the entries of an optimizer's state over all ranks.

    An entry is missing on a rank only if its parameter lies on other ranks.

    Raises:
        CheckpointError: ranks hold different entries for one parameter, or one lacks an entry of a parameter it has.
    """
    united: dict[str, Any] = {}
    texts_of: dict[str, dict[int, str]] = {}
    for first, report in reports.distinct.items():
        for key, item in report.entries[name]:
            united.setdefault(json.dumps(key), [key, item])
            texts_of.setdefault(json.dumps(key), {})[first] = json.dumps(item)
    for text, texts in texts_of.items():
        for first, report in reports.distinct.items():
            if first not in texts and united[text][0] not in report.elsewhere[name]:
                texts[first] = "absent"
        if len(set(texts.values())) > 1:
            raise differs(f"{name}.state[{text}]", reports.by_rank(texts))
    return list(united.values())


def differs(path: str, texts: Mapping[int, str]) -> CheckpointError:
    """Return the error for state that differs between ranks at ``path``, with the text of each rank there."""
    return CheckpointError(
        f"The state to save differs between ranks: {path}.",
        evidence=f"{fold_values(texts)}\n{_NOTHING_WRITTEN}",
        do="save only what is the same on every rank; all_reduce() a rank's own number first, or leave it out",
    )
