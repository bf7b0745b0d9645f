# SPDX-License-Identifier: Apache-2.0
"""Values sent between ranks unchanged."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rankwise.comm.collectives.group import gather_json, gather_rows
from rankwise.comm.session import agreed, exchange_of, rank_in_group, source_in_group
from rankwise.errors import ConfigurationError
from rankwise.tensors.arrays import as_sent, back, bytes_of, dtypes, flattened, kinds, sent_as_bytes
from rankwise.torch_private.tensors import TreeSpec, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.session import Group

T = TypeVar("T")


def broadcast(value: T, source: int = 0, *, group: Group | None = None) -> T:
    """Give every rank what rank ``source`` holds.

    Called by: every rank of ``group``, in the same order, with the same shapes and dtypes.

    Args:
        value: as for :func:`rankwise.all_reduce`; on ranks other than ``source`` only its type and shape matter.
        source: the rank of the world whose value all receive.
        group: from :func:`rankwise.new_group`; default: all ranks.

    Returns:
        The same kind and shape as ``value``. Never an alias of it.

    Raises:
        ConfigurationError: rank ``source`` does not exist, or this rank is not in ``group``.
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.

    Source: torch.distributed.broadcast.
    """
    place = source_in_group(group, source, "broadcast")
    leaves, tensors, spec = flattened(value, "broadcast")
    words = f"broadcast({kinds(tensors, spec)}, source={source})"
    exchange = agreed(words, group, sends=bool(tensors))
    sent = [as_sent(tensor) for tensor in tensors]
    if exchange is None:
        results = [tensor.clone(memory_format=torch.contiguous_format) for tensor in sent]
    else:
        send = partial(exchange.broadcast, source=place, what=words)
        results = [rows[0] for rows in sent_as_bytes(sent, lambda tensor: send(tensor).unsqueeze(0), 1)]
    return tree_unflatten(list(map(back, leaves, results)), spec)  # type: ignore[no-any-return]


def all_gather(value: T, *, group: Group | None = None) -> list[T]:
    """Collect ``value`` of every rank.

    Called by: every rank of ``group``, in the same order, with the same shapes and dtypes.

    Args:
        value: as for :func:`rankwise.all_reduce`.
        group: from :func:`rankwise.new_group`; default: all ranks.

    Returns:
        A list of values of the same kind as ``value``, one per rank, in rank order.

    Raises:
        ConfigurationError: this rank is not in ``group``.
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.

    Source: torch.distributed.all_gather.
    """
    leaves, tensors, spec = flattened(value, "all_gather")
    words = f"all_gather({kinds(tensors, spec)})"
    exchange = agreed(words, group, sends=bool(tensors))
    sent = [as_sent(tensor) for tensor in tensors]
    if exchange is None:
        rows = [tensor.clone().unsqueeze(0) for tensor in sent]
    else:
        rows = sent_as_bytes(sent, partial(exchange.all_gather, what=words), exchange.world_size)
    gathered = [[back(leaf, row) for row in parts.unbind(0)] for leaf, parts in zip(leaves, rows, strict=True)]
    return _by_rank(gathered, spec, 1 if exchange is None else exchange.world_size)


def all_gather_uneven(value: T, *, group: Group | None = None) -> list[T]:
    """Collect ``value`` of every rank, whose shapes may differ: predictions for a last batch that does not divide.

    Called by: every rank of ``group``, in the same order, with the same dtypes.

    Every rank sends as much as the largest one, so it is for ranks that differ little.

    Args:
        value: as for :func:`rankwise.all_reduce`; shapes may differ between ranks, empty ones included.
        group: from :func:`rankwise.new_group`; default: all ranks.

    Returns:
        A list of values of the same kind as ``value``, one per rank, in rank order, each in its own shape.

    Raises:
        ConfigurationError, CollectiveMismatch, PeerFailed, PeerMissing: as :func:`all_gather`.
    """
    leaves, tensors, spec = flattened(value, "all_gather_uneven")
    what = f"all_gather_uneven({dtypes(tensors, spec)})"
    exchange = exchange_of(group)
    shapes = gather_json([list(tensor.shape) for tensor in tensors], what=what, group=group)
    gathered: list[list[object]] = []
    for number, (leaf, tensor) in enumerate(zip(leaves, tensors, strict=True)):
        data = bytes_of(as_sent(tensor))
        sizes = [tensor.element_size() * prod(of_rank[number]) for of_rank in shapes]
        rows = [data] if exchange is None else gather_rows(exchange, data, sizes, what)
        gathered.append(_of_bytes(leaf, tensor, rows, [of_rank[number] for of_rank in shapes]))
    return _by_rank(gathered, spec, len(shapes))


def _of_bytes(
    leaf: object, like: torch.Tensor, rows: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
) -> list[object]:
    """Return the values that ranks sent as bytes, each in its own memory: a rank that keeps one need not keep all."""
    return [
        back(leaf, row.clone().view(like.dtype).view(tuple(shape))) for row, shape in zip(rows, shapes, strict=True)
    ]


def _by_rank(leaves: Sequence[Sequence[object]], spec: TreeSpec, size: int) -> list[Any]:
    """Return the value of each rank, from the leaves of all: ``leaves[number][rank]``."""
    return [tree_unflatten([parts[place] for parts in leaves], spec) for place in range(size)]


def whole_batch(value: T, *, gradients: bool = False, group: Group | None = None) -> T:
    """Return the samples of all ranks: ``value`` of every rank, one after another, in the order of the global batch.

    Called by: every rank of ``group``, in the same order, with the same dtypes; also by a rank without samples.

    For statistics of the whole batch, such as counts of labels or the mean of the targets, and for losses that compare
    the samples of a batch with one another. Such a loss is the whole batch's if each rank computes all of it, from
    ``whole_batch(outputs, gradients=True)`` and ``whole_batch(targets)``:

    >>> import rankwise, torch
    >>> world = rankwise.join()
    >>> targets = torch.tensor([1.0, 2.0, 6.0])  # of this rank
    >>> everything = rankwise.whole_batch(targets)
    >>> (targets - everything.mean()) / everything.std()
    tensor([-0.7559, -0.3780,  1.1339])
    >>> rankwise.leave()

    Args:
        value: as for :func:`rankwise.all_reduce`; the first dim of each tensor holds this rank's samples.
        gradients: whether gradients pass. The loss, or its term, must be computed from such values and parameters
            alone, and so be the same on every rank: each rank then takes the gradients of its own samples, and the
            average over ranks is the gradient of that loss. This holds for losses that the strategy of the model
            reads: of ``replicate``, ``shard`` and ``local_sgd``.
        group: from :func:`rankwise.new_group`; default: all ranks.

    Returns:
        A value of the same kind as ``value``, the same on every rank.

    Raises:
        ConfigurationError, CollectiveMismatch, PeerFailed, PeerMissing: as :func:`all_gather`.
    """
    leaves, tensors, spec = flattened(value, "whole_batch")
    if any(tensor.ndim == 0 for tensor in tensors):
        raise ConfigurationError(
            "whole_batch joins the rows of all ranks, but a number has none.",
            do="use rankwise.all_gather() for numbers, or pass tensors with one row per sample",
        )
    columns = list(zip(*all_gather_uneven(tensors, group=group), strict=True))
    wholes = [back(leaf, torch.cat(parts)) for leaf, parts in zip(leaves, columns, strict=True)]
    if gradients:
        place = rank_in_group(group)
        wholes = [
            _with_gradients(leaf, whole, [len(one) for one in parts], place)
            for leaf, whole, parts in zip(leaves, wholes, columns, strict=True)
        ]
    return tree_unflatten(wholes, spec)  # type: ignore[no-any-return]


def _with_gradients(leaf: object, whole: object, sizes: Sequence[int], place: int) -> object:
    if not (isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled()):
        return whole
    return WholeBatch.apply(leaf, whole, sum(sizes[:place]), sum(size > 0 for size in sizes))


class WholeBatch(torch.autograd.Function):
    """The samples of all ranks; the gradient of this rank's own is their part, for an average over ranks."""

    is_used = False
    """Whether a loss may be computed from one."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - torch's takes any
        ctx: Any,
        own: torch.Tensor,
        whole: torch.Tensor,
        start: int,
        num_active: int,
    ) -> torch.Tensor:
        """Return ``whole``, which holds ``own`` from row ``start`` on; ``num_active`` ranks have samples."""
        WholeBatch.is_used = True
        ctx.start, ctx.num, ctx.num_active = start, len(own), num_active
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """Return this rank's part, times the number of ranks whose gradients are averaged."""
        return gradient.narrow(0, ctx.start, ctx.num) * ctx.num_active, None, None, None


def all_to_all(values: Sequence[T], *, group: Group | None = None) -> list[T]:
    """Send a value to every rank, and receive one from each.

    Called by: every rank of ``group``, in the same order, with the same dtypes.

    Args:
        values: one per rank, in rank order: tensor or array, or a list, tuple or dict of them. Their shapes may
            differ, between ranks too; empty ones are fine.
        group: from :func:`rankwise.new_group`; default: all ranks.

    Returns:
        What each rank sent to this one, in rank order.

    Raises:
        ConfigurationError: not one value per rank, or values of different types; or as :func:`all_gather`.
        CollectiveMismatch, PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.

    Source: torch.distributed.all_to_all.
    """
    exchange, own = exchange_of(group), rank_in_group(group)
    size = 1 if exchange is None else exchange.world_size
    if isinstance(values, dict) or not hasattr(values, "__len__"):
        raise ConfigurationError(
            f"all_to_all takes a list of values, not {type(values).__name__}.", do="pass one per rank, in rank order"
        )
    if len(values) != size:
        raise ConfigurationError(
            f"all_to_all got {len(values)} values for {size} ranks.", do="pass one per rank, in rank order"
        )
    flat = [flattened(value, "all_to_all") for value in values]
    leaves, first, spec = flat[0]
    words = [dtypes(tensors, other) for _, tensors, other in flat]
    if any(other != spec for _, _, other in flat) or any(word != words[0] for word in words):
        raise ConfigurationError(
            "all_to_all got values of different types.",
            evidence="\n".join(
                f"for rank {place}: {kinds(tensors, other)}" for place, (_, tensors, other) in enumerate(flat)
            ),
            do="pass values of the same type and dtype for every rank; only shapes may differ",
        )
    what = f"all_to_all({words[0]})"
    shapes = gather_json([[list(tensor.shape) for tensor in tensors] for _, tensors, _ in flat], what=what, group=group)
    received: list[list[object]] = []
    for number, (leaf, like) in enumerate(zip(leaves, first, strict=True)):
        given = torch.cat([bytes_of(as_sent(tensors[number])) for _, tensors, _ in flat])
        sizes = [[like.element_size() * prod(shape[number]) for shape in of_rank] for of_rank in shapes]
        taken = given if exchange is None else exchange.all_to_all(given, sizes, what=what)
        parts = taken.split([row[own] for row in sizes])
        received.append(_of_bytes(leaf, like, parts, [of_rank[own][number] for of_rank in shapes]))
    return _by_rank(received, spec, size)
