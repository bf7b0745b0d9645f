# SPDX-License-Identifier: Apache-2.0
"""Typed collectives: one type in, the same type out, trees of tensors too.

Tensors, NumPy arrays and Python numbers, alone or in lists, tuples and dicts. In a world of one each is the
identity. Results never alias what was given.
"""

from __future__ import annotations

import json
import operator
import pickle
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.utils import _pytree as pytree

from rankwise.errors import ConfigurationError
from rankwise.exchange.reducing import can_reduce
from rankwise.session import current

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.exchange.protocol import Exchange

T = TypeVar("T")

OPS = ("sum", "mean", "min", "max", "product")


def all_reduce(value: T, op: str = "sum") -> T:
    """Combine ``value`` over all ranks.

    Called by: every rank, in the same order, with the same shapes and dtypes.

    Args:
        value: tensor, NumPy array, number, or a list, tuple or dict of them; any shape.
        op: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"product"``. The mean of integers is an error:
            reduce a float, or sum and divide.

    Returns:
        The same kind, shape and dtype, equal on every rank. Never an alias of ``value``.

    Raises:
        ConfigurationError: unknown ``op``, or something that cannot be reduced.
        CollectiveMismatch: ranks called different things; nothing was sent.
        PeerFailed: another rank failed.
        PeerMissing: another rank left, or did not come in time.

    Source: torch.distributed.all_reduce.
    """
    if op not in OPS:
        raise ConfigurationError(f"all_reduce knows no op {op!r}.", do="use one of " + ", ".join(OPS))
    world_size = current().world.world_size
    for leaf in pytree.tree_leaves(value):
        _check_reducible(_tensor_of(leaf, "all_reduce").dtype, op)

    def reduce_leaf(tensor: torch.Tensor, exchange: Exchange | None) -> torch.Tensor:
        plain = _plain(tensor)
        if exchange is None:
            return plain.clone(memory_format=torch.contiguous_format)
        what = f'all_reduce("{op}", {_kind(tensor)})'
        result = exchange.all_reduce(plain, "sum" if op == "mean" else op, what=what)
        return result.div_(world_size) if op == "mean" else result

    exchange = _agreed(f'all_reduce("{op}", {_kinds(value, "all_reduce")})', sends=_has_leaves(value))
    return _map(value, "all_reduce", partial(reduce_leaf, exchange=exchange))


def broadcast(value: T, source: int = 0) -> T:
    """Give every rank what rank ``source`` holds.

    Called by: every rank, in the same order, with the same shapes and dtypes.

    Args:
        value: as for :func:`all_reduce`; on ranks other than ``source`` only its kind and shape count.
        source: the rank whose value all receive.

    Returns:
        The same kind and shape as ``value``. Never an alias of it.

    Raises:
        ConfigurationError: there is no rank ``source``.
        PeerFailed, PeerMissing: as :func:`all_reduce`.

    Source: torch.distributed.broadcast.
    """
    _check_rank("broadcast", source)

    def broadcast_leaf(tensor: torch.Tensor, exchange: Exchange | None) -> torch.Tensor:
        plain = _plain(tensor)
        if exchange is None:
            return plain.clone(memory_format=torch.contiguous_format)
        return exchange.broadcast(plain, source, what=f"broadcast({_kind(tensor)}, source={source})")

    exchange = _agreed(f"broadcast({_kinds(value, 'broadcast')}, source={source})", sends=_has_leaves(value))
    return _map(value, "broadcast", partial(broadcast_leaf, exchange=exchange))


def all_gather(value: T) -> list[T]:
    """Collect ``value`` of every rank.

    Called by: every rank, in the same order, with the same shapes and dtypes.

    Args:
        value: as for :func:`all_reduce`.

    Returns:
        A list of ``world_size`` values of the same kind as ``value``, in rank order.

    Raises:
        PeerFailed, PeerMissing: as :func:`all_reduce`.

    Source: torch.distributed.all_gather.
    """
    world_size = current().world.world_size

    def gather_leaf(tensor: torch.Tensor, exchange: Exchange | None) -> torch.Tensor:
        plain = _plain(tensor)
        if exchange is None:
            return plain.clone().unsqueeze(0)
        return exchange.all_gather(plain, what=f"all_gather({_kind(tensor)})")

    exchange = _agreed(f"all_gather({_kinds(value, 'all_gather')})", sends=_has_leaves(value))
    leaves, spec = pytree.tree_flatten(value)
    gathered = [_gather_leaf(leaf, partial(gather_leaf, exchange=exchange)) for leaf in leaves]
    return [pytree.tree_unflatten([parts[rank] for parts in gathered], spec) for rank in range(world_size)]


def barrier() -> None:
    """Return when every rank has called it.

    Called by: every rank, in the same order.

    Raises:
        PeerFailed, PeerMissing: as :func:`all_reduce`; the missing ranks are named.
    """
    _agreed("barrier()", sends=False)


def all_gather_object(value: T) -> list[T]:
    """Collect a picklable object of every rank, in rank order; objects may differ in type and size.

    Called by: every rank, in the same order.

    The ranks of a job trust each other: objects are pickled.

    Raises:
        PeerFailed, PeerMissing: as :func:`all_reduce`.
    """
    payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    exchange = _agreed("all_gather_object()")
    return [
        pickle.loads(one)  # noqa: S301 - from a rank of this job
        for one in _gather_bytes(exchange, payload, "all_gather_object")
    ]


def gather_json(value: object, *, what: str) -> list[Any]:
    """Collect what JSON can say from every rank, in rank order: what rankwise itself tells between ranks.

    Called by: every rank, in the same order.

    Unlike :func:`all_gather_object` it runs nothing that another rank has sent.

    Args:
        value: None, booleans, numbers, texts, lists and text-keyed dicts of them; tuples become lists.
        what: is told, or by which call, in the words that ranks are compared by: ``"rankwise.mesh()"``.

    Raises:
        CollectiveMismatch, PeerFailed, PeerMissing: as :func:`all_reduce`.
    """
    # A seed or a length may be an integer of NumPy's.
    payload = json.dumps(value, default=operator.index).encode()
    return [json.loads(one) for one in _gather_bytes(_agreed(what), payload, what)]


def _gather_bytes(exchange: Exchange | None, payload: bytes, name: str) -> list[bytes]:
    """Return the bytes of every rank, which may differ in length."""
    if exchange is None:
        return [payload]
    data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    sizes = exchange.all_gather(torch.tensor([data.numel()]), what=f"{name}: sizes").flatten()
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    padded[: data.numel()] = data
    rows = exchange.all_gather(padded, what=f"{name}: values")
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes.tolist(), strict=True)]


def broadcast_object(value: T, source: int = 0) -> T:
    """Give every rank the picklable object of rank ``source``.

    Called by: every rank, in the same order. ``value`` counts on ``source`` only.

    The ranks of a job trust each other: objects are pickled.

    Raises:
        ConfigurationError: there is no rank ``source``.
        PeerFailed, PeerMissing: as :func:`all_reduce`.
    """
    _check_rank("broadcast_object", source)
    is_source = current().world.rank == source
    payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL) if is_source else b""
    exchange = _agreed(f"broadcast_object(source={source})")
    if exchange is None:
        return pickle.loads(payload)  # type: ignore[no-any-return] # noqa: S301 - our own bytes
    size = int(exchange.broadcast(torch.tensor([len(payload)]), source, what="broadcast_object(size)"))
    data = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if is_source else torch.empty(size).byte()
    received = exchange.broadcast(data, source, what="broadcast_object(value)")
    return pickle.loads(received.numpy().tobytes())  # type: ignore[no-any-return] # noqa: S301 - from a rank of this job


def _agreed(what: str, *, sends: bool = True) -> Exchange | None:
    """Hold what follows to be one call, the same on every rank; return what carries it."""
    exchange = current().exchange
    if exchange is not None:
        if sends:
            exchange.agree(what)
        else:
            exchange.meet(what)
    return exchange


def _check_reducible(dtype: torch.dtype, op: str) -> None:
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigurationError(
            f"all_reduce cannot take the mean of {dtype}: it would be cut to an integer.",
            do="pass a float, or use op='sum' and divide",
        )
    if not can_reduce(dtype, "sum" if op == "mean" else op):
        raise ConfigurationError(
            f'all_reduce("{op}") does not know {dtype}.',
            do="convert it first, integers to torch.int32 or int64, floats to torch.float32; all_gather takes any",
        )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return what lies in memory as it is to be sent."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _has_leaves(value: object) -> bool:
    return bool(pytree.tree_leaves(value))


def _kinds(value: object, name: str) -> str:
    return ", ".join(_kind(_tensor_of(leaf, name)) for leaf in pytree.tree_leaves(value))


def _check_rank(name: str, source: int) -> None:
    world_size = current().world.world_size
    if not 0 <= source < world_size:
        raise ConfigurationError(
            f"{name} has no rank {source} to take from.",
            evidence=f"the ranks are 0 to {world_size - 1}",
            do="pass source= one of them",
        )


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _map(value: T, name: str, leaf_fn: Callable[[torch.Tensor], torch.Tensor]) -> T:
    leaves, spec = pytree.tree_flatten(value)
    results = [_back(leaf, leaf_fn(_tensor_of(leaf, name))) for leaf in leaves]
    return pytree.tree_unflatten(results, spec)  # type: ignore[no-any-return]


def _gather_leaf(leaf: object, leaf_fn: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    rows = leaf_fn(_tensor_of(leaf, "all_gather"))
    return [_back(leaf, row) for row in rows.unbind(0)]


def _tensor_of(leaf: object, name: str) -> torch.Tensor:
    """Return a leaf as a tensor on the device its kind travels on."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    if isinstance(leaf, np.ndarray | np.generic):
        return torch.from_numpy(np.array(leaf))
    if isinstance(leaf, bool | int):
        return torch.tensor(int(leaf), dtype=torch.int64)
    if isinstance(leaf, float):
        return torch.tensor(leaf, dtype=torch.float64)
    raise ConfigurationError(
        f"{name} takes tensors, NumPy arrays and numbers, not {type(leaf).__name__}.",
        do=f"use {'all_gather_object' if name == 'all_gather' else 'broadcast_object'} for other objects",
    )


def _back(leaf: object, tensor: torch.Tensor) -> Any:  # noqa: ANN401 - the leaf's own type
    """Return ``tensor`` as the kind of thing ``leaf`` is."""
    if isinstance(leaf, torch.Tensor):
        return tensor
    if isinstance(leaf, np.generic):
        return leaf.dtype.type(tensor.item())
    if isinstance(leaf, np.ndarray):
        return tensor.numpy()
    return type(leaf)(tensor.item())  # type: ignore[call-arg]
