# SPDX-License-Identifier: Apache-2.0
"""Tensors as a few numbers: random projections, digests of samples, and batches taken apart by row.

Projections are linear: those of N ranks' rows add up to those of one rank's. Imported by ``recorder`` and ``loaders``.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from rankwise.checkpoint.dtensor_layout import as_dtensor, region_of
from rankwise.tools.verify.records import Sketch
from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUM_DIRECTIONS = 8
WIDTH = 2**16
"""More elements than this are added up, with random signs, into as many, before they are projected."""
_SEED = 20_240_229


def _numbers(*key: int) -> np.random.Generator:
    """Return a generator that the script cannot influence: torch's may be followed while a model runs."""
    return np.random.default_rng((_SEED, *key))


def of_tensor(tensor: torch.Tensor) -> Sketch:
    """Return the sketch of a tensor of any shape; of this rank's part if ranks hold parts, whose sketches add up."""
    plain = _plain(_in_its_place(tensor))
    return Sketch(tuple(tensor.shape), 1, _squares(plain), tuple(_projected(plain.reshape(1, -1))[0].tolist()))


def ranks_of_parts(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the ranks that hold parts of a tensor; empty if each holds all of it."""
    split = as_dtensor(tensor)
    return () if split is None else tuple(split.device_mesh.mesh.flatten().tolist())


def _in_its_place(tensor: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor in which the parts of other ranks, and those that several ranks hold, are zero."""
    split = as_dtensor(tensor)
    if split is None:
        return tensor
    whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=own_part(tensor).device)
    region = region_of(tensor, "")
    coordinate = cast("Sequence[int]", split.device_mesh.get_coordinate() or ())
    is_first = all(not one.is_replicate() or not at for one, at in zip(split.placements, coordinate, strict=True))
    if region is not None and is_first:
        bounds = zip(region.offsets, region.shape, strict=True)
        whole[tuple(slice(start, start + size) for start, size in bounds)] = own_part(tensor).detach()
    return whole


def of_rows(tensor: torch.Tensor) -> Sketch:
    """Return the sketch of the sum of the rows of ``tensor``: [rows, ...]."""
    plain = _plain(tensor)
    projected = _projected(plain.reshape(plain.shape[0], math.prod(plain.shape[1:])))
    bends = (projected * projected.abs()).sum(0)
    projections = tuple(projected.sum(0).tolist())
    return Sketch(tuple(tensor.shape[1:]), tensor.shape[0], _squares(plain), projections, tuple(bends.tolist()))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    local = getattr(dense, "to_local", None)
    return (dense if local is None else local()).detach().to("cpu", torch.float64)


def _squares(plain: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(plain)) ** 2 if plain.numel() else 0.0


def _projected(rows: torch.Tensor) -> torch.Tensor:
    """Return the projections of each row: [rows, elements] to [rows, directions]."""
    num_elements = rows.shape[1]
    if num_elements > WIDTH:
        blocks = torch.nn.functional.pad(rows, (0, -num_elements % WIDTH)).view(rows.shape[0], -1, WIDTH)
        rows = (_signs(blocks.shape[1]) @ blocks).view(rows.shape[0], WIDTH)
    return rows @ _directions(rows.shape[1])


@cache
def _directions(size: int) -> torch.Tensor:
    return torch.from_numpy(_numbers(size).standard_normal((size, NUM_DIRECTIONS)))


@cache
def _signs(size: int) -> torch.Tensor:
    return torch.from_numpy(_numbers(size).integers(0, 2, size) * 2.0 - 1.0)


def digests_of_rows(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return one digest per row over the bits of all ``tensors``, which have the same number of rows."""
    total = torch.zeros(tensors[0].shape[0], dtype=torch.int64)
    for number, tensor in enumerate(tensors):
        rows = tensor.detach().to("cpu").reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
        if rows.is_complex():
            rows = torch.view_as_real(rows).flatten(1)
        bits = rows.to(torch.float64).view(torch.int64) if rows.is_floating_point() else rows.to(torch.int64)
        # Products wrap around: a polynomial hash modulo 2**64.
        mixed = bits ^ (bits >> 29)
        total = total * 1_000_003 + (mixed * _odd(bits.shape[1], number)).sum(1)
    return tuple(total.tolist())


@cache
def _odd(size: int, number: int) -> torch.Tensor:
    return torch.from_numpy(_numbers(size, number).integers(-(2**62), 2**62, size) * 2 + 1)


# -- batches -------------------------------------------------------------------------------------------------


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return the tensors of a batch or of a module's arguments, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for one in cast("dict[Any, object]", value).values() for tensor in tensors_in(one)]
    if isinstance(value, list | tuple):
        return [tensor for one in cast("list[object]", value) for tensor in tensors_in(one)]
    return []


def with_rows(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that have as many rows as the first one with any."""
    sized = [one for one in tensors if one.dim() > 0 and one.layout is torch.strided]
    return [one for one in sized if one.shape[0] == sized[0].shape[0]]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a batch with ``change`` applied to its leaves; lists of text count as leaves."""
    if isinstance(value, dict):
        changed = {key: mapped(one, change) for key, one in value.items()}
        return changed if type(value) is dict else _as_type(value, changed)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(one, change) for one in value))
    if isinstance(value, list | tuple) and not _is_leaf(value):
        return type(value)(mapped(one, change) for one in value)
    return change(value)


def _as_type(like: Any, changed: dict[Any, Any]) -> Any:
    try:
        return type(like)(changed)
    except TypeError:
        return changed


def _is_leaf(value: list[Any] | tuple[Any, ...]) -> bool:
    return bool(value) and not any(isinstance(one, torch.Tensor | dict | list | tuple) for one in value)


def joined(parts: Sequence[Any]) -> Any:
    """Return the batches of several ranks as one, in rank order.

    Raises:
        ValueError: they cannot be joined: other shapes, or values that are not the same.
    """
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if first.dim() == 0:
            return first
        if any(one.shape[1:] != first.shape[1:] for one in parts):
            shapes = ", ".join(str(list(one.shape)) for one in parts)
            raise ValueError(f"batches of shapes {shapes} cannot be joined")
        return torch.cat(list(parts))
    if isinstance(first, dict):
        return _as_type(first, {key: joined([one[key] for one in parts]) for key in first})
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(joined(column) for column in zip(*parts, strict=True)))
    if isinstance(first, list | tuple):
        if _is_leaf(first):
            return type(first)(one for part in parts for one in part)
        return type(first)(joined(column) for column in zip(*parts, strict=True))
    return first


@cache
def permutation(num_rows: int) -> torch.Tensor:
    """Return a fixed permutation of so many rows."""
    return torch.from_numpy(_numbers(num_rows).permutation(num_rows))


@cache
def inverse_permutation(num_rows: int) -> torch.Tensor:
    """Return the permutation that undoes :func:`permutation`."""
    return torch.argsort(permutation(num_rows))


def permuted(batch: Any) -> Any:
    """Return a batch with its rows in another order."""
    rows = with_rows(tensors_in(batch))
    if not rows:
        return batch
    num_rows = rows[0].shape[0]

    def change(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == num_rows:
            return leaf[permutation(num_rows).to(leaf.device)]
        if isinstance(leaf, list | tuple) and len(leaf) == num_rows:
            return type(leaf)(leaf[number] for number in permutation(num_rows).tolist())
        return leaf

    return mapped(batch, change)


def in_float64(batch: Any) -> Any:
    """Return a batch with its floating-point tensors in float64."""

    def change(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return mapped(batch, change)
