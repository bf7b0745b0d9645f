# SPDX-License-Identifier: Apache-2.0
"""What ranks report to one another of their losses in every step, and what the reports amount to together.

A rank reports a list of numbers of one length, whatever its loss is, so that ranks whose losses differ are notified of
it instead of waiting for one another. The numbers are the terms of its loss, the lengths of its samples (in
``row_lengths``), its batch (in ``same_batch``) and what the guard of replicas compares. They travel on a lane of their
own and arrive added up. Used by loss_on_ranks and pipeline.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from rankwise.comm.backends.protocol import ChannelSize
from rankwise.parallel.loss.row_lengths import report_of_rows, unequal_elements
from rankwise.parallel.state_guard.guard import NUM_NUMBERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.errors import ConfigurationError
    from rankwise.health.call_site import CallSite
    from rankwise.parallel.loss.row_lengths import RowLengths
    from rankwise.parallel.loss.terms import Term


MOST_TERMS = 12
_HEADER = 16
_PER_TERM = 6
REPORT_LENGTH = _HEADER + _PER_TERM * MOST_TERMS
"""How many numbers each rank reports."""
_BATCHES = REPORT_LENGTH + NUM_NUMBERS
"""Where the numbers of the ranks' batches begin, after those of losses and guards."""
_NOTHING_OF_GUARD = (0.0,) * NUM_NUMBERS


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


def report_of(
    verdict: Verdict, weight: float = 0.0, num_samples: float = 0.0, rows: RowLengths | None = None
) -> list[float]:
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
    report = [
        weight,
        num_samples,
        1.0,
        mode,
        mode**2,
        code,
        code**2,
        num_rows,
        float(len(terms)),
        *report_of_rows(rows),
    ]
    for term in terms:
        flags = [float(term.is_share), float(term.is_odd), float(term.kind == "sum")]
        report += [term.amount, term.divisor, term.divisor**2, *flags]
    return report


def _code(terms: Sequence[Term]) -> int:
    """Return a number for the operations of a loss, small enough that the sum of its squares is exact."""
    operations = [f"{term.kind} {term.operation}" for term in terms]
    return zlib.crc32(" ".join(operations).encode()) & 0xFFFFF


TermReading = Literal["mean", "sum", "share", "constant", "both"]
"""How a term is read on all ranks.

A sum over a Python number is a mean where the number is a ``share`` of the samples, and a sum where it is a
``constant``; ``both``: it may be either.
"""


class GlobalTerm(NamedTuple):
    """One term, on all ranks together."""

    reading: TermReading
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


def _reading(active: int, num_rows: float, part: Sequence[float]) -> TermReading:
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


class TermReadings:
    """The readings of one model's losses, step by step; the same on every rank that reads them."""

    def __init__(self, ambiguous: Callable[[GlobalTerm, CallSite | None], ConfigurationError]) -> None:
        """Remember nothing yet.

        Args:
            ambiguous: returns the error for a term of the loss at a line that can be read in two ways.
        """
        self._ambiguous = ambiguous
        self._known: dict[tuple[int, CallSite | None, int, bool], TermReading] = {}
        """By the loss, its line, the number of the term and if it is divided."""

    def check(self, combined: GlobalLoss, place: CallSite | None) -> None:
        """Raise if a sum over a number was read otherwise in an earlier step, or cannot be read at all.

        Args:
            combined: the losses of all ranks.
            place: the line of the backward.
        """
        for number, term in enumerate(combined.terms):
            if term.reading == "mean":
                continue
            key = _key(combined, number, place)
            known = self._known.get(key)
            # A constant may happen to be the number of samples of every rank.
            fitting = {"both", known} | ({"share"} if known == "constant" and term.has_one_divisor else set())
            is_contradicted = known is not None and term.reading not in fitting
            if is_contradicted or (known is None and term.reading == "both"):
                raise self._ambiguous(term, place)
            if known is None:
                self._known[key] = term.reading

    def of(self, combined: GlobalLoss, number: int, place: CallSite | None) -> TermReading:
        """Return how a term is read, by earlier steps before this one."""
        return self._known.get(_key(combined, number, place), combined.terms[number].reading)


def _key(combined: GlobalLoss, number: int, place: CallSite | None) -> tuple[int, CallSite | None, int, bool]:
    return combined.code, place, number, combined.terms[number].divisor > 0


def channel_length(num_ranks: int) -> int:
    """Return how many numbers travel with each step."""
    return _BATCHES + num_ranks


class Reports(NamedTuple):
    """What the ranks have reported."""

    losses: Sequence[float]
    """[REPORT_LENGTH], of all ranks together."""
    guards: Sequence[float]
    """[NUM_NUMBERS], of all ranks together."""
    batches: Sequence[float]
    """[num_ranks], of each rank."""


class ReportChannel:
    """Takes one report of each rank in every step."""

    def __init__(self, group: Exchange, model_name: str) -> None:
        """Open the lane.

        Called by: every rank of ``group``, in the same order.

        Args:
            group: the ranks that train the model.
            model_name: for errors.
        """
        length = channel_length(group.world_size)
        size = ChannelSize(length, 1, torch.float64, torch.device("cpu"))
        (self._channel,) = group.channels([size], f"loss of {model_name}")
        self._rank = group.rank
        self._num_ranks = group.world_size
        # Several times as fast as tensors and arrays are for a few numbers.
        self._form = struct.Struct(f"={length}d")
        self._body = self._channel.body.numpy().data
        self._result = self._channel.result.numpy().data

    def send(self, loss: Sequence[float], guard: Sequence[float] | None, batch: int) -> None:
        """Send this rank's report. Called by: every rank, once per step.

        Args:
            loss: at most REPORT_LENGTH numbers, followed by zeros.
            guard: of the guard, where it compares.
            batch: number of this rank's batch.
        """
        batches = [0.0] * self._num_ranks
        batches[self._rank] = batch
        rest = [0.0] * (REPORT_LENGTH - len(loss))
        self._channel.claim()
        self._form.pack_into(self._body, 0, *loss, *rest, *(guard or _NOTHING_OF_GUARD), *batches)
        # As it is: a lane's mean of what was not divided by the number of ranks is the sum, to the last bit.
        self._channel.start(1.0, 1.0, ())

    def receive(self) -> Reports:
        """Wait for the reports of all ranks."""
        self._channel.finish()
        sums = self._form.unpack_from(self._result)
        return Reports(sums[:REPORT_LENGTH], sums[REPORT_LENGTH:_BATCHES], sums[_BATCHES:])
