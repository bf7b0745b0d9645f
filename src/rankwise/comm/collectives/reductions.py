# SPDX-License-Identifier: Apache-2.0
"""Values of all ranks combined into one: on every rank, a part on each, or their mean over the samples of all ranks."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, SupportsFloat, TypeVar, cast

import torch

from rankwise.comm.backends.staging import REDUCIBLE, reduce_into
from rankwise.comm.session import agreed, rank_in_group
from rankwise.errors import ConfigurationError
from rankwise.tensors.arrays import as_sent, back, bytes_of, flattened, kind, kinds, sent_by_dtype
from rankwise.torch_private.tensors import tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.session import Group

T = TypeVar("T")

OPS = ("sum", "mean", "min", "max", "product")
_OPS_ELSEWHERE = {"avg": "mean", "average": "mean", "prod": "product", "add": "sum"} | {op: op for op in OPS}
"""Other names of them, as of torch's ``ReduceOp``, in small letters."""


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
        send = partial(_mean, exchange, words) if op == "mean" else partial(exchange.all_reduce, op=op, what=words)
        results = sent_by_dtype(sent, send)
    return tree_unflatten(list(map(back, leaves, results)), spec)  # type: ignore[no-any-return]


def _mean(exchange: Exchange, words: str, tensor: torch.Tensor) -> torch.Tensor:
    return exchange.all_reduce(tensor, "sum", what=words).div_(exchange.world_size)


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
    size = 1 if exchange is None else exchange.world_size
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
    return tree_unflatten(results, spec)  # type: ignore[no-any-return]


def _check(name: str, tensors: list[torch.Tensor], op: str) -> None:
    if op not in OPS:
        meant = _OPS_ELSEWHERE.get(str(op).rpartition(".")[2].lower())
        hint = f"; did you mean {meant!r}?" if meant else ""
        raise ConfigurationError(f"{name} has no op {op!r}{hint or '.'}", do="use one of " + ", ".join(OPS))
    for tensor in tensors:
        dtype = tensor.dtype
        if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
            raise ConfigurationError(
                f"{name} cannot take the mean of {dtype}: it would be cut to an integer.",
                do="pass a float, or use op='sum' and divide",
            )
        if dtype not in REDUCIBLE["sum" if op == "mean" else op]:
            raise ConfigurationError(
                f'{name}("{op}") does not support {dtype}.',
                do="convert it first, integers to torch.int32 or int64, floats to torch.float32; all_gather takes any",
            )


def mean(
    values: SupportsFloat | Sequence[SupportsFloat],
    weights: SupportsFloat | Sequence[SupportsFloat],
    *,
    group: Group | None = None,
) -> float:
    """Return the mean over the samples of all ranks, from losses that are each the mean over one rank's samples.

    Called by: every rank of ``group``, in the same order; also by a rank without samples.

    A loss that a rank prints is the mean over its own share of the batch. ``rankwise.mean(loss, len(x))`` is the mean
    over the whole batch. For a whole epoch, collect and call it once, which communicates once:

    >>> losses, sizes = [0.5, 0.25], [30, 10]  # of each step: loss.detach(), len(x)
    >>> import rankwise
    >>> world = rankwise.join()
    >>> rankwise.mean(losses, sizes)
    0.4375
    >>> rankwise.leave()

    If only some ranks call it, for example inside ``if world.rank == 0:``, it raises :class:`CollectiveMismatch` on
    every rank whose next collective is another one, and otherwise waits for the missing ranks up to the timeout of
    :func:`join`.

    Args:
        values: a number or a tensor of one element; or a list of them, of any length on each rank.
        weights: how many samples (or tokens) each value is the mean over; as many as ``values``, at least zero. A value
            of weight zero is left out: the loss of an empty share, which is NaN, does not make the mean NaN.
        group: from :func:`rankwise.new_group`; default: all ranks.

    Returns:
        sum(weight * value) / sum(weight) over all values of all ranks, computed in float64, the same on every rank. NaN
        if all weights are zero, or a value of positive weight is NaN.

    Raises:
        ConfigurationError: numbers of values and weights differ, a value is not one number, or a weight is negative or
            not finite.
        CollectiveMismatch, PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """
    found, given = _numbers(values, "values"), _numbers(weights, "weights")
    if len(found) != len(given):
        raise ConfigurationError(
            f"mean() was given {len(found)} values and {len(given)} weights.",
            do="pass one weight per value: the number of samples that it is the mean over",
        )
    wrong = next((weight for weight in given if not (math.isfinite(weight) and weight >= 0)), None)
    if wrong is not None:
        raise ConfigurationError(
            f"A weight of mean() must be at least zero and finite, got {wrong}.",
            do="pass the number of samples that the value is the mean over: rankwise.mean(loss, len(x))",
        )
    total = sum(weight * value for value, weight in zip(found, given, strict=True) if weight)
    sums = torch.tensor([total, sum(given)], dtype=torch.float64)
    exchange = agreed("mean", group)
    if exchange is not None:
        sums = exchange.all_reduce(sums, what="mean")
    total, weight = sums.tolist()
    return total / weight if weight else math.nan


def _numbers(given: object, name: str) -> list[float]:
    several = given if isinstance(given, list | tuple) else [given]
    try:
        # torch warns of a number from a loss that still has its graph.
        return [float(one.detach() if isinstance(one, torch.Tensor) else cast("SupportsFloat", one)) for one in several]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"mean() takes numbers and tensors of one element, but {name} holds something else.",
            evidence=str(error),
            do="reduce each loss to one number first: loss.mean()",
        ) from None
