# SPDX-License-Identifier: Apache-2.0
"""The weight of the gradients of a step, once the losses of all its micro-batches are known. Values only.

The gradients of each micro-batch were scaled by the number its loss is a mean over, relative to the first one's: one
factor for all of them remains.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from rankwise.replicate.loss.amounts import plain, ratio
from rankwise.replicate.loss.reports import MOST_TERMS, REPORT_LENGTH, Mode, combine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Amount
    from rankwise.health.call_site import CallSite
    from rankwise.replicate.loss.reports import GlobalLoss, TermReadings


class StepWeight(NamedTuple):
    """The weight of the gradients of a step of one copy of the pipeline."""

    factor: Amount
    """Turns the copy's loss and gradients into those of its batch."""
    share: Amount
    """The weight of its gradients in the sum over copies, including the factor."""
    divisor: Amount
    """This copy's part of the divisor of that sum."""
    total: Amount | None
    """The number that the gradients of all copies are the mean over; ``None``: the sum of the divisors."""


NO_STEP = StepWeight(1.0, 0.0, 0.0, 0.0)
"""Stands for a weight that another rank will send."""


class CopyLosses(NamedTuple):
    """The losses of the micro-batches of one copy of the pipeline in a step."""

    counted: Amount
    """Samples of the micro-batches, each times its scale beyond its share of the samples."""
    num_unlike: float
    """Micro-batches that were averaged by samples, since no single number scales all terms of their losses."""
    num_penalties: float
    """Micro-batches whose loss has terms of parameters alone."""
    amounts: tuple[Amount, ...]
    """[MOST_TERMS], the number each term is a mean over, summed over micro-batches."""
    reports: tuple[float, ...]
    """[REPORT_LENGTH], the sum of the reports of the micro-batches."""

    @property
    def num_samples(self) -> float:
        """Samples of the micro-batches."""
        return self.reports[1]

    def numbers(self) -> list[float]:
        """Return all fields as one list; a number that is on a device is NaN."""
        known = map(plain, (self.counted, self.num_unlike, self.num_penalties, *self.amounts))
        return [*known, *self.reports]

    def on_device(self, device: torch.device) -> torch.Tensor:
        """Return the numbers that may be on a device: [1 + MOST_TERMS]."""
        found = torch.zeros(1 + MOST_TERMS, dtype=torch.float64, device=device)
        for place, amount in zip(found, (self.counted, *self.amounts), strict=True):
            place.fill_(amount)
        return found

    def with_those(self, numbers: torch.Tensor) -> CopyLosses:
        """Return the same with the result of :meth:`on_device`."""
        return self._replace(counted=numbers[0], amounts=tuple(numbers[1:]))

    @classmethod
    def of(cls, numbers: Sequence[float]) -> CopyLosses:
        """Return the inverse of :meth:`numbers`."""
        counted, num_unlike, num_penalties, *rest = numbers
        return cls(counted, num_unlike, num_penalties, tuple(rest[:MOST_TERMS]), tuple(rest[MOST_TERMS:]))


NOTHING = CopyLosses(0.0, 0.0, 0.0, (0.0,) * MOST_TERMS, (0.0,) * REPORT_LENGTH)
"""Of a copy without samples."""


class StepLosses(NamedTuple):
    """The losses of all copies together."""

    combined: GlobalLoss
    is_sum: bool
    by_samples: bool
    """Whether micro-batches or copies are averaged by samples, since the loss shows no better weight."""

    def weight_of(self, copies: Sequence[CopyLosses], place: int) -> StepWeight:
        """Return the weight of the step of the copy at ``place``."""
        own, combined = copies[place], self.combined
        if self.is_sum:
            num_micro_batches = own.reports[2]
            factor = num_micro_batches * own.num_samples / own.counted if own.counted else 1.0
            # Sums over copies are divided by one.
            share = factor if num_micro_batches else 0.0
            return StepWeight(factor, share, float(place == 0), combined.num_samples)
        if isinstance(own.counted, torch.Tensor):
            return self._weight_on_device(copies, own, own.counted)
        factor = own.num_samples / own.counted if own.counted else 1.0
        weight, total = own.num_samples, combined.num_samples
        if not self.by_samples:
            # Multiples of the samples, so that a mean over samples is bitwise the same.
            first = next((_per_sample(one) for one in copies if any(one.amounts)), None)
            weight *= 0.0 if first is None else times(_per_sample(own), first) or 0.0
            total = combined.weight
        return StepWeight(factor, factor * weight, weight, total)

    def _weight_on_device(self, copies: Sequence[CopyLosses], own: CopyLosses, counted: torch.Tensor) -> StepWeight:
        """Return the same for losses of one term, whose amounts are on a device."""
        factor = torch.where(counted == 0, 1.0, own.num_samples / counted)
        amounts = [cast("torch.Tensor", one.amounts[0]) for one in copies]
        first, *others = [amount / max(one.num_samples, 1.0) for amount, one in zip(amounts, copies, strict=True)]
        for other in others:
            first = torch.where(first == 0, other, first)
        weight = ratio(cast("torch.Tensor", own.amounts[0]), first)
        return StepWeight(factor, factor * weight, weight, torch.stack(amounts).sum())


def settled(copies: Sequence[CopyLosses], readings: TermReadings, place: CallSite | None) -> StepLosses | None:
    """Return the losses of all copies together; ``None`` if they do not have the same terms.

    Called by: the last stage of each copy, with the same ``copies``.

    Args:
        copies: their losses.
        readings: of divided sums, in earlier steps.
        place: the line of the step.

    Raises:
        ConfigurationError: a sum divided by a number is ambiguous.
    """
    combined = combine([sum(column) for column in zip(*(copy.reports for copy in copies), strict=True)])
    if not combined.num_active:
        return StepLosses(combined, is_sum=False, by_samples=True)
    if not combined.is_alike:
        return None
    combined = _with_shares(combined)
    if combined.num_active > 1:
        readings.check(combined, place)
    reads = {readings.of(combined, number, place) for number in range(len(combined.terms))}
    is_sum = combined.mode is Mode.SUM or (bool(reads) and reads <= {"sum", "constant"})
    is_mean = combined.mode is Mode.MEAN or (bool(reads) and reads <= {"mean", "share"})
    by_samples = (
        any(copy.num_unlike for copy in copies)
        or (is_sum and any(copy.num_penalties for copy in copies))
        or not (is_sum or (is_mean and _are_proportional(copies)))
    )
    return StepLosses(combined, is_sum and not by_samples, by_samples)


def _with_shares(combined: GlobalLoss) -> GlobalLoss:
    """Read a sum divided by the size of each micro-batch as a mean, unless that is the size of the whole batch too.

    Micro-batches, unlike ranks, nearly always have one size, so any multiple of the batch's would be ambiguous.
    """
    terms = [
        term._replace(reading="share")
        if term.reading == "both" and not term.is_odd and term.divisor != combined.num_rows
        else term
        for term in combined.terms
    ]
    return combined._replace(terms=tuple(terms))


def times(amounts: Sequence[float], first: Sequence[float]) -> float | None:
    """Return the multiple of ``first`` that all amounts are, exactly 1.0 if close to it; ``None`` if they differ."""
    multiple = next((one / other for one, other in zip(amounts, first, strict=True) if other), 0.0)
    if not all(math.isclose(one, other * multiple, rel_tol=1e-9) for one, other in zip(amounts, first, strict=True)):
        return None
    return 1.0 if math.isclose(multiple, 1.0, rel_tol=1e-12) else multiple


def _are_proportional(copies: Sequence[CopyLosses]) -> bool:
    if isinstance(copies[0].amounts[0], torch.Tensor):
        return True  # amounts of several terms are read
    active = [_per_sample(one) for one in copies if any(one.amounts)]
    return all(times(one, active[0]) is not None for one in active)


def _per_sample(copy: CopyLosses) -> tuple[float, ...]:
    amounts = cast("tuple[float, ...]", copy.amounts)
    return tuple(amount / copy.num_samples for amount in amounts) if copy.num_samples else amounts
