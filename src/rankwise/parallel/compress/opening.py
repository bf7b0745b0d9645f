# SPDX-License-Identifier: Apache-2.0
"""Opens the lanes of a model's buckets, each as its way of compressing wants it."""

from __future__ import annotations

from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING

from rankwise.exchange.protocol import words_of_lanes
from rankwise.parallel.compress.at_once import AtOnceLane, Journey
from rankwise.parallel.compress.largest import Largest
from rankwise.parallel.compress.low_rank import Factors, LowRankLane, Plan
from rankwise.parallel.compress.methods import Narrow, PowerSGD, TopK
from rankwise.parallel.compress.narrow import DTYPES, NarrowLane
from rankwise.parallel.compress.quantised import Quantised

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rankwise.exchange.protocol import Exchange, Lane, LaneSize
    from rankwise.parallel.compress.methods import Method


def open_lanes(
    method: Method | None,
    exchange: Exchange,
    sizes: Sequence[LaneSize],
    shapes: Sequence[Sequence[torch.Size]],
    what: str,
) -> list[Lane]:
    """Return a lane for each size, to be started in this order.

    Called by: every rank of ``exchange``, with the same arguments.

    Args:
        method: how what travels is compressed.
        exchange: the ranks.
        sizes: of the lanes, as they are used.
        shapes: of the gradients in each, one behind the other.
        what: travels, in words.
    """
    if method is None:
        return exchange.lanes(sizes, what)
    is_real = [size.dtype.is_floating_point for size in sizes]
    if not all(is_real):
        # Complex numbers travel as they are.
        whole = iter(exchange.lanes(list(compress(sizes, [not real for real in is_real])), what))
        rest, shapes_of_rest = list(compress(sizes, is_real)), list(compress(shapes, is_real))
        smaller = iter(open_lanes(method, exchange, rest, shapes_of_rest, what) if rest else ())
        return [next(smaller if real else whole) for real in is_real]
    words = f"{what} by {method}"
    if isinstance(method, Narrow):
        return _narrow(method, exchange, sizes, words)
    if isinstance(method, PowerSGD):
        return _low_rank(method, exchange, sizes, shapes, words)
    own = exchange.twin()
    exchange.meet("; ".join(words_of_lanes(sizes, words)))
    way = Largest(own, method.share, words) if isinstance(method, TopK) else Quantised(own, words)
    journeys = {device: Journey(own, way) for device in dict.fromkeys(size.device for size in sizes)}
    return [AtOnceLane(journeys[size.device], size, inside) for size, inside in zip(sizes, shapes, strict=True)]


def _narrow(method: Narrow, exchange: Exchange, sizes: Sequence[LaneSize], what: str) -> list[Lane]:
    dtype = DTYPES[method.dtype]
    inner = [replace(size, dtype=dtype) if size.dtype.itemsize > dtype.itemsize else size for size in sizes]
    return [
        lane if small == size else NarrowLane(lane, size)
        for lane, small, size in zip(exchange.lanes(inner, what), inner, sizes, strict=True)
    ]


def _low_rank(
    method: PowerSGD,
    exchange: Exchange,
    sizes: Sequence[LaneSize],
    shapes: Sequence[Sequence[torch.Size]],
    what: str,
) -> list[Lane]:
    plans = [Plan(of_bucket, method.rank) for of_bucket in shapes]
    first = exchange.lanes(
        [replace(size, num_elements=plan.num_first) for size, plan in zip(sizes, plans, strict=True)], what
    )
    thin = [
        replace(size, num_elements=plan.num_second) for size, plan in zip(sizes, plans, strict=True) if plan.matrices
    ]
    own = exchange.twin()
    second = iter(own.lanes(thin, f"second factors of {what}") if thin else ())
    factors = Factors(own, what)
    return [
        LowRankLane(plan, lane, next(second) if plan.matrices else None, size, factors)
        for plan, lane, size in zip(plans, first, sizes, strict=True)
    ]
