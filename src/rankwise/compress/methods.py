# SPDX-License-Identifier: Apache-2.0
"""The methods of compressing gradients, as values, and the channels of buckets that each method opens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from numbers import Real
from typing import TYPE_CHECKING

import torch

from rankwise.comm.backends.choose import MirrorChannel
from rankwise.comm.backends.protocol import describe_channels
from rankwise.compress.allgather_channel import AllGatherChannel, SharedAllGather, sum_of_largest, sum_of_quantised
from rankwise.compress.low_rank import FactorPlan, Factors, LowRankChannel
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Amount, BucketChannel, ChannelSize, Exchange


@dataclass(frozen=True)
class Narrow:
    """Gradients are sent in a dtype of two bytes, ``"bf16"`` or ``"fp16"``, and added up in float32 if possible.

    Rounding errors are lost: bf16 keeps 8 bits of each number, fp16 keeps 11 and overflows above 65504.
    """

    dtype: str


@dataclass(frozen=True)
class Int8:
    """Gradients are sent as integers of one byte, with a scale for every 256 of them: a quarter of float32.

    Each rank adds its rounding errors to its next gradients (error feedback), so that nothing is lost over time.

    Source: Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014), for the error feedback; sums are
        quantised in both directions.
    """


@dataclass(frozen=True)
class PowerSGD:
    """Matrices of gradients are sent as two thin factors, of ``rank`` columns each; vectors are sent as they are.

    A matrix [n, m] takes (n + m) * rank numbers instead of n * m. Each rank adds the error of its factors to its next
    gradients.

    Args:
        rank: columns of the factors; 1 to 4 are usual.

    Raises:
        ConfigurationError: ``rank`` is not an integer of at least one.

    Source: Vogels et al., "PowerSGD" (arXiv:1905.13727), algorithms 1 and 2, with warm start.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ConfigurationError(
                f"rank of PowerSGD must be an integer of at least 1, got {self.rank!r}.",
                do="pass rank= the number of columns",
            )


@dataclass(frozen=True)
class TopK:
    """Only the largest gradients of each bucket are sent, with their places; the others are added to the next ones.

    Bytes grow with the number of ranks: each sends its own choice to every other.

    Args:
        share: of the gradients that are sent, above 0 and at most 1.

    Raises:
        ConfigurationError: ``share`` is outside these bounds.

    Source: Stich et al., "Sparsified SGD with Memory" (arXiv:1809.07599), algorithm 1.
    """

    share: float = 0.01

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, Real) or not 0.0 < self.share <= 1.0:
            raise ConfigurationError(
                f"share of TopK must be above 0 and at most 1, got {self.share!r}.", do="pass share=0.01, for example"
            )


Method = Narrow | Int8 | PowerSGD | TopK

NAMED: dict[str, Method] = {
    "bf16": Narrow("bf16"),
    "fp16": Narrow("fp16"),
    "int8": Int8(),
    "powersgd": PowerSGD(),
    "top-k": TopK(),
}


def method_of(compress: object) -> Method | None:
    """Return the method that ``compress=`` names.

    Raises:
        ConfigurationError: there is no such method; the error lists the known ones.
    """
    if compress is None or isinstance(compress, Narrow | Int8 | PowerSGD | TopK):
        return compress
    if isinstance(compress, str) and compress in NAMED:
        return NAMED[compress]
    raise ConfigurationError(
        f"Gradients cannot be compressed by {compress!r}.",
        do=f"pass compress= one of {', '.join(map(repr, NAMED))}, "
        "rankwise.PowerSGD(rank=...) or rankwise.TopK(share=...)",
    )


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
