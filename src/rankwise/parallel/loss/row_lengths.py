# SPDX-License-Identifier: Apache-2.0
"""The lengths of the samples that a loss is a mean over: where they differ between ranks, the mean is not exact.

A rank that pads its samples to the longest of its own averages over more or fewer elements of each sample than other
ranks do. Used by reports, which takes the lengths to the other ranks, by loss_on_ranks and by pipeline.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.parallel.loss.terms import ForwardCall, Term

STEPS_OF_A_CONSTANT = 3
"""In how many steps one after the other a number is the same that is taken for a constant."""


@dataclass(frozen=True, slots=True)
class RowLengths:
    """The samples of a rank, where a plain mean is over all elements of each."""

    loss: float
    """Elements of each sample that the loss is a mean over."""
    given: int
    """Elements per sample of what the model was given."""
    scale: float
    """What Python numbers scale the loss by."""


class RowLengthsInSteps:
    """The rows of one model's losses, step by step.

    A Python number may take the padding out again, as in ``(loss * mask).mean() * (mask.numel() / int(mask.sum()))``.
    It is a constant if it is the same in several steps and on all ranks, and not one, as where nothing is masked.
    """

    def __init__(self) -> None:
        self._scales: tuple[float, ...] = ()
        self._num_alike = 0

    def read(self, terms: Sequence[Term], call: ForwardCall | None, num_samples: int | None) -> RowLengths | None:
        """Return what is known of the rows of a loss; ``None`` where its rows are not known to be samples.

        Called once per loss.

        Args:
            terms: of the loss.
            call: of the model.
            num_samples: that a loader gave this rank; ``None`` where none did. By it batches whose first dim is the
                sequence are known.
        """
        if call is None or not num_samples or len(call.sizes) < 2 or call.sizes[0] != num_samples:  # noqa: PLR2004
            return None
        of_samples = [term for term in terms if term.per_row and term.num_rows == num_samples]
        if not of_samples:
            return None
        scales = tuple(itertools.chain.from_iterable(term.scales for term in of_samples))
        self._num_alike = self._num_alike + 1 if scales == self._scales else 1
        self._scales = scales
        if scales and (self._num_alike < STEPS_OF_A_CONSTANT or 1.0 in scales):
            return None
        # Each rank has the same terms: where none differs, neither does their sum.
        elements = math.fsum(term.per_row for term in of_samples)
        return RowLengths(elements, math.prod(call.sizes[1:]), math.prod(scales))


def report_of_rows(rows: RowLengths | None) -> list[float]:
    """Return the numbers by which ranks compare their rows."""
    if rows is None:
        return [0.0] * 7
    loss, given, scale = rows.loss, float(rows.given), rows.scale
    return [1.0, loss, loss**2, given, given**2, scale, scale**2]


def unequal_elements(
    num_active: int, sums: Sequence[float], are_equal: Callable[[int, float, float], bool]
) -> float | None:
    """Return over how many elements of each sample ranks take means, on average, if samples differ in length.

    Args:
        num_active: ranks that have samples.
        sums: of what they have reported of their rows.
        are_equal: whether values whose sum and sum of squares are given are all the same.
    """
    with_rows, losses, squares_of_losses, given, squares_of_given, scales, squares_of_scales = sums
    if round(with_rows) < num_active or not are_equal(num_active, scales, squares_of_scales):
        return None
    if are_equal(num_active, losses, squares_of_losses) or are_equal(num_active, given, squares_of_given):
        return None
    return losses / num_active


def unequal_lengths(rows: RowLengths | None, elements: float, place: str) -> ConfigurationError:
    """Return the error of a mean over samples whose lengths differ between ranks.

    Args:
        rows: of this rank; ``None`` where it has no samples.
        elements: of each sample, on average over the ranks that have some.
        place: the line of the backward, in words.
    """
    own = "this rank has no samples" if rows is None else f"{rows.loss:g} elements per sample on this rank"
    return ConfigurationError(
        f"The mean in the loss at {place} averages over different numbers of elements per sample on different ranks.",
        evidence=f"{own}; {elements:g} on average over all ranks\n"
        "if each rank pads its samples to the longest of its own: one rank would pad all of them to one length, and "
        "count more padding\n"
        "if samples differ in size, as images do: each may count by its elements, or all may count the same",
        do="leave padding out of the mean: (loss * mask).sum() / mask.sum(), ignore_index; or pad to a fixed length\n"
        "for samples of several sizes, put backward() into `with rankwise.weight(model, x.numel()):` if every element "
        "counts the same, or rankwise.weight(model, len(x)) if every sample does",
    )
