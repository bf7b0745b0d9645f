# SPDX-License-Identifier: Apache-2.0
"""Tensors as a few numbers: random projections, digests of samples, and batches taken apart by row.

Projections are linear: those of N ranks' rows add up to those of one rank's. Imported by ``recorder`` and ``loaders``.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rankwise.checkpoint.layouts import as_dtensor, region_of
from rankwise.torch_private.dtensor import own_part
from rankwise.torch_private.tensors import tree_flatten, tree_leaves, tree_map, tree_unflatten
from rankwise.verify.records import Sketch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    coordinate: Sequence[int] = split.device_mesh.get_coordinate() or ()
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


def of_optimizer_state(held: Mapping[Any, Any], parameter: str) -> dict[str, tuple[float, float]]:
    """Return the sum and the norm of each tensor that an optimizer holds for a parameter."""
    found: dict[str, tuple[float, float]] = {}
    for key, value in held.items():
        if isinstance(value, torch.Tensor) and value.numel() and (value.is_floating_point() or value.dim() == 0):
            wide = value.detach().double()
            found[f"{key} of {parameter}"] = float(wide.sum()), float(wide.norm())
    return found


def hyperparameters_of(group: dict[str, Any]) -> dict[str, float]:
    """Return the hyperparameters of a parameter group that are numbers."""
    found: dict[str, float] = {}
    for key, value in group.items():
        if key == "params":
            continue
        if isinstance(value, bool | int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            found[key] = float(value)
        elif isinstance(value, tuple) and all(isinstance(one, int | float) for one in value):
            found |= {f"{key}[{number}]": float(one) for number, one in enumerate(value)}
    return found


def digests_of_rows(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return one digest per row over the values of all ``tensors``, which have the same number of rows."""
    parts = [_wide(tensor).numpy() for tensor in tensors]
    rows = (b"".join(part[number].tobytes() for part in parts) for number in range(len(parts[0])))
    return tuple(int.from_bytes(hashlib.blake2b(row, digest_size=8).digest(), "little") for row in rows)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return values that do not depend on the dtype which holds them."""
    plain = tensor.detach().to("cpu")
    if plain.is_complex():
        return plain.to(torch.complex128)
    return plain.to(torch.float64 if plain.is_floating_point() else torch.int64)


# -- batches -------------------------------------------------------------------------------------------------


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return the tensors of a batch or of a module's arguments, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def with_rows(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that have as many rows as the first one with any."""
    sized = [one for one in tensors if one.dim() > 0 and one.layout is torch.strided]
    return [one for one in sized if one.shape[0] == sized[0].shape[0]]


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Return a batch, or arguments, with floating-point tensors in a dtype."""

    def change(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(change, values)


def joined(parts: Sequence[Any]) -> Any:
    """Return the batches of several ranks as one, in rank order.

    Raises:
        ValueError: they cannot be joined: other shapes, or values that are not the same.
    """
    spec = tree_flatten(parts[0], is_leaf=_is_column)[1]
    columns = zip(*(tree_leaves(part, is_leaf=_is_column) for part in parts), strict=True)
    return tree_unflatten(map(_joined_leaf, columns), spec)


def _joined_leaf(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor) and first.dim():
        if any(one.shape[1:] != first.shape[1:] for one in parts):
            shapes = ", ".join(str(list(one.shape)) for one in parts)
            raise ValueError(f"batches of shapes {shapes} cannot be joined")
        return torch.cat(list(parts))
    return type(first)(one for part in parts for one in part) if _is_column(first) else first


def _is_column(value: object) -> bool:
    """Return whether a list or a tuple holds one value per sample, such as texts."""
    if not isinstance(value, list | tuple) or not value or hasattr(value, "_fields"):
        return False
    return not any(isinstance(one, torch.Tensor | dict | list | tuple) for one in value)  # pyright: ignore[reportUnknownVariableType]


@cache
def permutation(num_rows: int) -> torch.Tensor:
    """Return a fixed permutation of so many rows."""
    return torch.from_numpy(_numbers(num_rows).permutation(num_rows))


def permuted(batch: Any) -> Any:
    """Return a batch with its rows in another order."""
    rows = with_rows(tensors_in(batch))
    num_rows = rows[0].shape[0] if rows else -1

    def change(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == num_rows:
            return leaf[permutation(num_rows).to(leaf.device)]
        if _is_column(leaf) and len(leaf) == num_rows:
            return type(leaf)(leaf[number] for number in permutation(num_rows).tolist())
        return leaf

    return tree_map(change, batch, is_leaf=_is_column)
