# SPDX-License-Identifier: Apache-2.0
"""What the terms of a loss ask of the ranks, and what the ranks' terms amount to together. Values only.

A rank reports a list of numbers of one length, whatever its loss is, so that ranks whose losses differ are notified of
it instead of waiting for one another.
"""

from __future__ import annotations

import zlib
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, NamedTuple

from rankwise.parallel.loss.padding import report_rows, unequal_elements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.parallel.loss.padding import Rows
    from rankwise.parallel.loss.reductions import Term

MOST_TERMS = 12
_HEADER = 16
_PER_TERM = 6
REPORT_LENGTH = _HEADER + _PER_TERM * MOST_TERMS
"""How many numbers each rank reports."""


class Mode(IntEnum):
    """How the gradients of a backward are put together."""

    SAMPLES = 1
    """Weighted by the samples of the forward: the loss does not show what it is a mean over."""
    MEAN = 2
    """Weighted by what the one mean of the loss is over."""
    SUM = 3
    """Added up: the loss is a sum over samples."""
    TERMS = 4
    """Each term scaled by itself, by what the ranks tell of it; then averaged."""
    NOTHING = 5
    """A rank without samples, whose loss says nothing."""


class Verdict(NamedTuple):
    """What this rank makes of its loss."""

    mode: Mode
    terms: tuple[Term, ...] = ()

    @property
    def weight(self) -> float:
        """What the one mean is over."""
        return next(term.amount for term in self.terms if term.kind == "mean")

    @property
    def unknown(self) -> Term | None:
        """The first term that is neither a mean nor a sum."""
        return next((term for term in self.terms if term.kind == "unknown"), None)


def verdict_of(terms: Sequence[Term]) -> Verdict:
    """Decide by the operations alone, never by values: those differ between ranks."""
    if len(terms) == 1 and terms[0].kind == "mean":
        # What most losses are.
        return Verdict(Mode.MEAN, tuple(terms))
    shared = tuple(term for term in terms if term.kind != "same")
    if not shared or any(term.kind == "unknown" for term in shared) or len(shared) > MOST_TERMS:
        return Verdict(Mode.SAMPLES, shared)
    has_constants = any(term.has_constants for term in shared)
    if len(shared) == 1 and shared[0].kind == "mean":
        return Verdict(Mode.MEAN, shared)
    if len(shared) == len(terms) and all(term.kind == "sum" for term in shared) and not has_constants:
        return Verdict(Mode.SUM, shared)
    return Verdict(Mode.TERMS, shared)


def as_one_sum(verdict: Verdict) -> Verdict:
    """Return a loss of several terms as one sum, where they are sums times constants; else averaged by samples."""
    is_sum = all(term.kind == "sum" and not term.divisor and not term.is_odd for term in verdict.terms)
    return Verdict(Mode.SUM if is_sum else Mode.SAMPLES, verdict.terms)


def report_of(verdict: Verdict, weight: float = 0.0, num_samples: float = 0.0, rows: Rows | None = None) -> list[float]:
    """Return what this rank reports of its loss: at most REPORT_LENGTH numbers, zeros where it ends earlier.

    Args:
        verdict: of its loss.
        weight: of its gradients.
        num_samples: of its forward.
        rows: of what its loss reduces.
    """
    if verdict.mode is Mode.NOTHING:
        return [weight, num_samples]
    terms = verdict.terms if verdict.mode is Mode.TERMS else ()
    code = float(_code(terms)) if terms else 0.0
    num_rows = float(max([term.num_rows for term in verdict.terms], default=0))
    mode = float(verdict.mode)
    report = [weight, num_samples, 1.0, mode, mode**2, code, code**2, num_rows, float(len(terms)), *report_rows(rows)]
    for term in terms:
        flags = [float(term.is_share), float(term.is_odd), float(term.kind == "sum")]
        report += [term.amount, term.divisor, term.divisor**2, *flags]
    return report


def _code(terms: Sequence[Term]) -> int:
    """Return a number for the operations of a loss, small enough that the sum of its squares is exact."""
    operations = [f"{term.kind} {term.operation}" for term in terms]
    return zlib.crc32(" ".join(operations).encode()) & 0xFFFFF


Reading = Literal["mean", "sum", "share", "constant", "both"]
"""How a term is read on all ranks.

A sum over a Python number is a mean where the number is a ``share`` of the samples, and a sum where it is a
``constant``; ``both``: it may be either.
"""


class GlobalTerm(NamedTuple):
    """One term, on all ranks together."""

    reading: Reading
    amount: float
    """What the mean is over on all ranks."""
    divisor: float
    """The Python number it is divided by, where that is the same on all ranks."""
    has_one_divisor: bool
    """Whether it is."""
    is_odd: bool = False
    """Whether some rank scales it by a number that may make a sum a mean."""


class GlobalLoss(NamedTuple):
    """The losses of all ranks."""

    weight: float
    """What the gradients weigh together."""
    num_samples: float
    """Samples of the forwards together."""
    num_active: int
    """Ranks that have samples."""
    is_alike: bool
    """Whether their losses have the same terms."""
    mode: Mode
    """Of those ranks, where they are alike."""
    code: int
    """A number for the operations of the loss."""
    terms: tuple[GlobalTerm, ...]
    elements: float | None = None
    """Over how many elements of each sample the means of ranks are, on average, where these are unequal and so are the
    ranks' inputs; else ``None``."""
    num_rows: float = 0.0
    """The first dim of what is reduced, on all ranks together."""


def combine(sums: Sequence[float]) -> GlobalLoss:
    """Return what the sums of all ranks' reports say. The same on every rank.

    Args:
        sums: [REPORT_LENGTH].
    """
    weight, num_samples, active, modes, squares, codes, squares_of_codes, rows, num_terms = sums[:9]
    active = round(active)
    is_alike = _are_equal(active, modes, squares) and _are_equal(active, codes, squares_of_codes)
    if not (active and is_alike):
        return GlobalLoss(weight, num_samples, active, is_alike, Mode.NOTHING, 0, ())
    terms = []
    for number in range(round(num_terms / active)):
        part = sums[_HEADER + _PER_TERM * number : _HEADER + _PER_TERM * (number + 1)]
        terms.append(
            GlobalTerm(
                _reading(active, rows, part), part[0], part[1] / active, _are_equal(active, *part[1:3]), part[4] > 0
            )
        )
    mode, code = Mode(round(modes / active)), round(codes / active)
    elements = unequal_elements(active, sums[9:_HEADER], _are_equal)
    return GlobalLoss(weight, num_samples, active, is_alike, mode, code, tuple(terms), elements, rows)


def _reading(active: int, num_rows: float, part: Sequence[float]) -> Reading:
    _, divisors, squares, num_shares, num_odd, num_sums = part
    if not num_sums:
        return "mean"
    if num_odd:
        return "both"
    if not _are_equal(active, divisors, squares):
        return "share"
    if not divisors:
        return "sum"
    if round(num_shares) < active:
        return "constant"
    is_both = active > 1 and num_rows and (divisors / active) % num_rows == 0
    return "both" if is_both else "share"


def _are_equal(num_ranks: int, sum_of_values: float, sum_of_squares: float) -> bool:
    """Return whether values whose sum and sum of squares are known are all the same."""
    return abs(num_ranks * sum_of_squares - sum_of_values**2) <= 1e-9 * max(sum_of_values**2, 1e-300)
