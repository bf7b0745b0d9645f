# SPDX-License-Identifier: Apache-2.0
"""Values of all ranks combined into one: on every rank, or a part on each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from rankwise.comm.backends.reducing import can_reduce, reduce_into
from rankwise.comm.collectives.group import agreed, rank_in_group, size_of
from rankwise.comm.collectives.trees import flattened, kind, kinds, sent_by_dtype
from rankwise.errors import ConfigurationError
from rankwise.tensors.arrays import as_sent, back, bytes_of
from rankwise.torch_private import tree as pytree

if TYPE_CHECKING:
    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.collectives.group import Group

T = TypeVar("T")

OPS = ("sum", "mean", "min", "max", "product")


def all_reduce(value: T, op: str = "sum", *, group: Group | None = None) -> T:
    """Combine ``value`` over all ranks.

    Called by: every rank of ``group``, in the same order, with the same shapes and dtypes.

    Args:
        value: tensor, NumPy array, array with ``__dlpack__`` (JAX, CuPy, TensorFlow), number, or a list, tuple or
            dict of them; any shape.
        op: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"product"``. The mean of integers is an error:
            reduce a float, or sum and divide.
        group: from :func:`rankwise.new_group`; default: all ranks.

    Returns:
        The same kind, shape and dtype, equal on every rank. Never an alias of ``value``; without gradients.

    Raises:
        ConfigurationError: unknown ``op``, a value that cannot be reduced, or this rank is not in ``group``.
        CollectiveMismatch: ranks made different calls; nothing was sent.
        PeerFailed: another rank failed.
        PeerMissing: another rank left, or did not arrive in time.

    Source: torch.distributed.all_reduce.
    """
    leaves, tensors, spec = flattened(value, "all_reduce")
    _check("all_reduce", tensors, op)
    words = f'all_reduce("{op}", {kinds(tensors, spec)})'
    exchange = agreed(words, group, sends=bool(tensors))
    sent = list(map(as_sent, tensors))
    if exchange is None:
        results = [tensor.clone(memory_format=torch.contiguous_format) for tensor in sent]
    else:
        results = sent_by_dtype(sent, partial(_reduced, exchange, op, words))
    return pytree.tree_unflatten(list(map(back, leaves, results)), spec)  # type: ignore[no-any-return]


def _reduced(exchange: Exchange, op: str, words: str, tensor: torch.Tensor) -> torch.Tensor:
    result = exchange.all_reduce(tensor, "sum" if op == "mean" else op, what=words)
    return result.div_(exchange.world_size) if op == "mean" else result


def reduce_scatter(value: T, op: str = "sum", *, group: Group | None = None) -> T:
    """Combine ``value`` over all ranks, and give each rank its part of the rows.

    Called by: every rank of ``group``, in the same order, with the same shapes and dtypes.

    Args:
        value: tensor or array, or a list, tuple or dict of them; [rows, ...]. The rows are divided as evenly as
            possible: of 7 rows three ranks get 3, 2 and 2.
        op: as for :func:`all_reduce`.
        group: from :func:`rankwise.new_group`; default: all ranks.

    Returns:
        This rank's rows of the result of :func:`all_reduce`; the first rank has the first ones.

    Raises:
        ConfigurationError: as :func:`all_reduce`; or a value has no rows.
        CollectiveMismatch, PeerFailed, PeerMissing: as :func:`all_reduce`.

    Source: torch.distributed.reduce_scatter_tensor.
    """
    leaves, tensors, spec = flattened(value, "reduce_scatter")
    _check("reduce_scatter", tensors, op)
    if any(tensor.ndim == 0 for tensor in tensors):
        raise ConfigurationError("reduce_scatter divides rows, but a number has none.", do="use rankwise.all_reduce()")
    exchange = agreed(f'reduce_scatter("{op}", {kinds(tensors, spec)})', group, sends=bool(tensors))
    size = size_of(group)
    results: list[object] = []
    for leaf, tensor in zip(leaves, tensors, strict=True):
        whole = as_sent(tensor)
        if exchange is None:
            results.append(back(leaf, whole.clone()))
            continue
        rows = [len(whole) // size + (place < len(whole) % size) for place in range(size)]
        row_bytes = whole[:1].nbytes
        sizes = [[count * row_bytes for count in rows]] * size
        what = f'reduce_scatter("{op}", {kind(tensor)})'
        received = exchange.all_to_all(bytes_of(whole), sizes, what=what).view(whole.dtype)
        own = whole.new_empty((rows[rank_in_group(group)], *whole.shape[1:]))
        reduce_into(own.view(-1), received.view(size, -1).unbind(0), "sum" if op == "mean" else op)
        results.append(back(leaf, own.div_(size) if op == "mean" else own))
    return pytree.tree_unflatten(results, spec)  # type: ignore[no-any-return]


def _check(name: str, tensors: list[torch.Tensor], op: str) -> None:
    if op not in OPS:
        raise ConfigurationError(f"{name} has no op {op!r}.", do="use one of " + ", ".join(OPS))
    for tensor in tensors:
        dtype = tensor.dtype
        if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
            raise ConfigurationError(
                f"{name} cannot take the mean of {dtype}: it would be cut to an integer.",
                do="pass a float, or use op='sum' and divide",
            )
        if not can_reduce(dtype, "sum" if op == "mean" else op):
            raise ConfigurationError(
                f'{name}("{op}") does not support {dtype}.',
                do="convert it first, integers to torch.int32 or int64, floats to torch.float32; all_gather takes any",
            )
