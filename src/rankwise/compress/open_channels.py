# SPDX-License-Identifier: Apache-2.0
"""Opens the channels of a model's buckets with their compression."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING

import torch

from rankwise.comm.backends.choose import MirrorChannel
from rankwise.comm.backends.protocol import describe_channels
from rankwise.compress.allgather_channel import AllGatherChannel, SharedAllGather, sum_of_largest, sum_of_quantised
from rankwise.compress.low_rank import FactorPlan, Factors, LowRankChannel
from rankwise.compress.methods import Narrow, PowerSGD, TopK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Amount, BucketChannel, ChannelSize, Exchange
    from rankwise.compress.methods import Method

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def open_channels(
    method: Method | None,
    exchange: Exchange,
    sizes: Sequence[ChannelSize],
    shapes: Sequence[Sequence[torch.Size]],
    what: str,
) -> list[BucketChannel]:
    """Return a channel for each size, to be started in this order.

    Called by: every rank of ``exchange``, with the same arguments.

    Args:
        method: how gradients are compressed; ``None`` for not at all.
        exchange: the ranks.
        sizes: of the channels, uncompressed.
        shapes: of the gradients in each, in order.
        what: names the gradients in errors.
    """
    if method is None:
        return exchange.channels(sizes, what)
    is_real = [size.dtype.is_floating_point for size in sizes]
    if not all(is_real):
        # Complex numbers are not compressed.
        whole = iter(exchange.channels(list(compress(sizes, [not real for real in is_real])), what))
        rest, shapes_of_rest = list(compress(sizes, is_real)), list(compress(shapes, is_real))
        smaller = iter(open_channels(method, exchange, rest, shapes_of_rest, what) if rest else ())
        return [next(smaller if real else whole) for real in is_real]
    description = f"{what} by {method}"
    if isinstance(method, Narrow):
        return _narrow(method, exchange, sizes, description)
    if isinstance(method, PowerSGD):
        return _low_rank(method, exchange, sizes, shapes, description)
    own = exchange.dup()
    exchange.barrier("; ".join(describe_channels(sizes, description)))
    compressed_sum = (
        partial(sum_of_largest, own, method.share, description)
        if isinstance(method, TopK)
        else partial(sum_of_quantised, own, description)
    )
    gathers = {device: SharedAllGather(own, compressed_sum) for device in dict.fromkeys(size.device for size in sizes)}
    return [AllGatherChannel(gathers[size.device], size, inside) for size, inside in zip(sizes, shapes, strict=True)]


def _narrow(method: Narrow, exchange: Exchange, sizes: Sequence[ChannelSize], what: str) -> list[BucketChannel]:
    dtype = DTYPES[method.dtype]
    inner = [replace(size, dtype=dtype) if size.dtype.itemsize > dtype.itemsize else size for size in sizes]
    return [
        channel if small == size else NarrowChannel(channel, size, exchange.world_size)
        for channel, small, size in zip(exchange.channels(inner, what), inner, sizes, strict=True)
    ]


class NarrowChannel(MirrorChannel):
    """A channel that rounds gradients once their sum has room: each is multiplied by its factor before."""

    def __init__(self, inner: BucketChannel, size: ChannelSize, num_ranks: int) -> None:
        super().__init__(inner, size)
        self._num_ranks = num_ranks
        self.factor = self._factor

    def start(self, share: Amount, weight: Amount, absent: Sequence[int]) -> None:
        """Copy the body, of which the factor is part already, and send it."""
        super().start((share != 0) * self._num_ranks, weight, absent)

    def _factor(self, share: Amount) -> Amount:
        return share / self._num_ranks


def _low_rank(
    method: PowerSGD,
    exchange: Exchange,
    sizes: Sequence[ChannelSize],
    shapes: Sequence[Sequence[torch.Size]],
    what: str,
) -> list[BucketChannel]:
    plans = [FactorPlan(of_bucket, method.rank) for of_bucket in shapes]
    first = exchange.channels(
        [replace(size, num_elements=plan.num_first) for size, plan in zip(sizes, plans, strict=True)], what
    )
    thin = [
        replace(size, num_elements=plan.num_second) for size, plan in zip(sizes, plans, strict=True) if plan.matrices
    ]
    own = exchange.dup()
    second = iter(own.channels(thin, f"second factors of {what}") if thin else ())
    factors = Factors(own, what)
    return [
        LowRankChannel(plan, channel, next(second) if plan.matrices else None, size, factors)
        for plan, channel, size in zip(plans, first, sizes, strict=True)
    ]
