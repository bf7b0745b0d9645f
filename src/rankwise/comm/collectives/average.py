# SPDX-License-Identifier: Apache-2.0
"""The mean over the samples of all ranks, from values that are each a mean over some of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, SupportsFloat, cast

import torch

from rankwise.comm.collectives.group import agreed
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.collectives.group import Group


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
