# SPDX-License-Identifier: Apache-2.0
"""The reports that ranks send each other about their losses in every step, and their sums over all ranks.

A rank reports a list of numbers of one length, whatever its loss is, so that ranks whose losses differ are notified
instead of waiting for one another. The numbers are the terms of its loss, the lengths of its samples, its batch and the
checksum of the state guard. They travel on a channel of their own and arrive added up. In order: what a rank makes of
its loss; lengths of samples; the report; sums of reports, and errors; the channel. Used by loss_on_ranks and pipeline.
"""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from rankwise.comm.backends.protocol import ChannelSize
from rankwise.comm.current_batch import check_same_batch
from rankwise.errors import ConfigurationError
from rankwise.health.call_site import user_call_site, words
from rankwise.replicate.loss.graph import plain
from rankwise.replicate.state_guard.guard import NUM_NUMBERS
from rankwise.tensors.checksum import are_equal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Amount, Exchange
    from rankwise.health.call_site import CallSite
    from rankwise.replicate.loss.graph import ForwardCall
    from rankwise.replicate.loss.terms import Term
    from rankwise.replicate.state_guard.guard import StateGuard

STEPS_OF_A_CONSTANT = 3
"""For how many consecutive steps a number must be the same to count as a constant."""
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
    """Each term scaled by itself, from the ranks' reports of it; then averaged."""
    NOTHING = 5
    """A rank without samples, whose loss is not read."""


class LossVerdict(NamedTuple):
    """What this rank makes of its loss."""

    mode: Mode
    terms: tuple[Term, ...] = ()

    def read(self) -> LossVerdict:
        """Return the same with Python numbers only. Waits for the device that others are on."""
        for term in self.terms:
            if isinstance(term.amount, torch.Tensor):
                return LossVerdict(self.mode, tuple(term._replace(amount=float(term.amount)) for term in self.terms))
        return self

    @property
    def unknown(self) -> Term | None:
        """The first term that is neither a mean nor a sum."""
        return next((term for term in self.terms if term.kind == "unknown"), None)


def verdict_of(terms: Sequence[Term]) -> LossVerdict:
    """Decide by the operations alone, never by values: those differ between ranks."""
    if len(terms) == 1 and terms[0].kind == "mean":  # as most losses
        return LossVerdict(Mode.MEAN, tuple(terms))
    shared = tuple(term for term in terms if term.kind != "same")
    if not shared or any(term.kind == "unknown" for term in shared):
        return LossVerdict(Mode.SAMPLES, shared)
    has_constants = any(term.has_constants for term in shared)
    if len(shared) == 1 and shared[0].kind == "mean":
        return LossVerdict(Mode.MEAN, shared)
    if len(shared) == len(terms) and all(term.kind == "sum" for term in shared) and not has_constants:
        return LossVerdict(Mode.SUM, shared)
    if len(shared) > MOST_TERMS:
        return LossVerdict(Mode.SAMPLES, shared)
    return LossVerdict(Mode.TERMS, shared)


def as_one_sum(verdict: LossVerdict) -> LossVerdict:
    """Return a loss of several terms as one sum if they are sums times constants; else averaged by samples."""
    is_sum = all(term.kind == "sum" and not term.divisor and not term.is_odd for term in verdict.terms)
    return LossVerdict(Mode.SUM if is_sum else Mode.SAMPLES, verdict.terms)


@dataclass(frozen=True, slots=True)
class RowLengths:
    """The samples of a rank, if a plain mean is over all elements of each.

    A rank that pads its samples to the longest of its own averages over more or fewer elements of each sample than
    other ranks do: the mean is then not exact.
    """

    loss: float
    """Elements of each sample that the loss is a mean over."""
    given: int
    """Elements per sample of the model's input."""
    scale: float
    """The product of the Python numbers that scale the loss."""


class RowLengthsInSteps:
    """The rows of one model's losses, step by step.

    A Python number may take the padding out again, as in ``(loss * mask).mean() * (mask.numel() / int(mask.sum()))``.
    It is a constant if it is the same in several steps and on all ranks, and not one, as if nothing is masked.
    """

    def __init__(self) -> None:
        self._scales: tuple[float, ...] = ()
        self._num_alike = 0

    def read(self, terms: Sequence[Term], call: ForwardCall | None, num_samples: int | None) -> RowLengths | None:
        """Return the lengths of the rows of a loss; ``None`` if its rows are not known to be samples.

        Called once per loss.

        Args:
            terms: of the loss.
            call: of the model.
            num_samples: that a loader gave this rank; ``None`` if no loader did. It tells batches whose first dim is
                the sequence apart.
        """
        if call is None or not num_samples or len(call.sizes) < 2 or call.sizes[0] != num_samples:  # noqa: PLR2004
            return None
        of_samples: list[Term] = []
        for term in terms:
            if term.kind in ("mean", "sum") and not term.num_rows:
                return None  # Other ranks add up the rows of more terms.
            if term.per_row and term.num_rows == num_samples:
                of_samples.append(term)
        if not of_samples:
            return None
        scales = tuple(itertools.chain.from_iterable(map(attrgetter("scales"), of_samples)))
        self._num_alike = self._num_alike + 1 if scales == self._scales else 1
        self._scales = scales
        if scales and (self._num_alike < STEPS_OF_A_CONSTANT or 1.0 in scales):
            return None
        # Each rank has the same terms: if none differs, neither does their sum.
        elements = math.fsum(map(attrgetter("per_row"), of_samples))
        return RowLengths(elements, math.prod(call.sizes[1:]), math.prod(scales))


def report_of(
    verdict: LossVerdict, weight: Amount = 0.0, num_samples: float = 0.0, rows: RowLengths | None = None
) -> list[float]:
    """Return this rank's report of its loss: at most REPORT_LENGTH numbers, to be followed by zeros.

    A number that is on a device is NaN, and so is its sum over ranks: then they add it up there.
    """
    if isinstance(weight, torch.Tensor):
        weight = math.nan
    if verdict.mode is Mode.NOTHING:
        return [weight, num_samples]
    terms = verdict.terms if verdict.mode is Mode.TERMS else ()
    code = float(_code(terms)) if terms else 0.0
    num_rows = float(max(map(attrgetter("num_rows"), verdict.terms), default=0))
    mode = float(verdict.mode)
    report = [weight, num_samples, 1.0, mode, mode**2, code, code**2, num_rows, float(len(terms))]
    if rows is None:
        report += [0.0] * (_HEADER - len(report))
    else:
        loss, given, scale = rows.loss, float(rows.given), rows.scale
        report += [1.0, loss, loss**2, given, given**2, scale, scale**2]
    for term in terms:
        flags = [float(term.is_share), float(term.is_odd), float(term.kind == "sum")]
        report += [plain(term.amount), term.divisor, term.divisor**2, *flags]
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
    amount: Amount
    """The number that the mean is over, on all ranks."""
    divisor: float
    """The Python number it is divided by, if that is the same on all ranks."""
    has_one_divisor: bool
    is_odd: bool = False
    """Whether some rank scales it by a number that may make a sum a mean."""


class GlobalLoss(NamedTuple):
    """The losses of all ranks."""

    weight: Amount
    """What the gradients weigh together."""
    num_samples: float
    """Samples of the forwards together."""
    num_active: Amount
    """Ranks that have samples."""
    is_alike: bool
    """Whether their losses have the same terms."""
    mode: Mode
    """Of those ranks, where they are alike."""
    code: int
    """A number for the operations of the loss."""
    terms: tuple[GlobalTerm, ...]
    elements: float | None = None
    """The mean over ranks of the elements of each sample that their losses average over, if these and the ranks'
    inputs are unequal; else ``None``."""
    num_rows: float = 0.0
    """The first dim of the reduced tensors, on all ranks together."""


def combine(sums: Sequence[float]) -> GlobalLoss:
    """Return the losses of all ranks from the sums [REPORT_LENGTH] of their reports. The same on every rank."""
    weight, num_samples, active, modes, squares, codes, squares_of_codes, rows, num_terms = sums[:9]
    active = round(active)
    is_alike = are_equal(active, modes, squares) and are_equal(active, codes, squares_of_codes)
    if not (active and is_alike):
        return GlobalLoss(weight, num_samples, active, is_alike, Mode.NOTHING, 0, ())
    terms = []
    for number in range(round(num_terms / active)):
        part = sums[_HEADER + _PER_TERM * number : _HEADER + _PER_TERM * (number + 1)]
        terms.append(
            GlobalTerm(
                _reading(active, rows, part), part[0], part[1] / active, are_equal(active, *part[1:3]), part[4] > 0
            )
        )
    mode, code = Mode(round(modes / active)), round(codes / active)
    elements = _unequal_elements(active, sums[9:_HEADER])
    return GlobalLoss(weight, num_samples, active, is_alike, mode, code, tuple(terms), elements, rows)


def as_expected(verdict: LossVerdict, sums: torch.Tensor) -> GlobalLoss:
    """Return a loss on all ranks, if all of them have this rank's terms, none of which needs to be compared.

    Args:
        verdict: of this rank.
        sums: [2 + MOST_TERMS] of the gradients' weights, of the ranks that have samples, and of the terms' amounts.
    """
    terms = verdict.terms if verdict.mode is Mode.TERMS else ()
    on_ranks = [
        GlobalTerm("sum" if term.kind == "sum" else "mean", amount, 0.0, has_one_divisor=True)
        for term, amount in zip(terms, sums[2:], strict=False)
    ]
    return GlobalLoss(sums[0], math.nan, sums[1], True, verdict.mode, _code(terms), tuple(on_ranks))


def _reading(active: int, num_rows: float, part: Sequence[float]) -> TermReading:
    _, divisors, squares, num_shares, num_odd, num_sums = part
    if not num_sums:
        return "mean"
    if num_odd:
        return "both"
    if not are_equal(active, divisors, squares):
        return "share"
    if not divisors:
        return "sum"
    if round(num_shares) < active:
        return "constant"
    is_both = active > 1 and num_rows and (divisors / active) % num_rows == 0
    return "both" if is_both else "share"


def _unequal_elements(num_active: int, sums: Sequence[float]) -> float | None:
    """Return over how many elements of each sample ranks take means, on average, if samples differ in length."""
    with_rows, losses, squares_of_losses, given, squares_of_given, scales, squares_of_scales = sums
    if round(with_rows) < num_active or not are_equal(num_active, scales, squares_of_scales):
        return None
    if are_equal(num_active, losses, squares_of_losses) or are_equal(num_active, given, squares_of_given):
        return None
    return losses / num_active


class LossWords(NamedTuple):
    """How errors name a loss that is computed in parts, and what to do if it does not show what it is a mean over."""

    whose: str
    """The model, or the pipeline."""
    part: str
    """What computes a part of it: a rank, or a micro-batch."""
    unlike: str
    """What is wrong if the parts have different terms."""
    do: str
    """How to give the number that the loss is a mean over."""

    def unlike_terms(self, terms: Sequence[Term]) -> ConfigurationError:
        """Return the error for parts with other terms than ``terms``, those of this rank."""
        return ConfigurationError(
            f"The loss of {self.whose} {self.unlike}.",
            evidence="on this rank: " + (", ".join(f"{one.kind} ({one.operation})" for one in terms) or "none"),
            do=f"compute every term on every {self.part}, also where it has no samples for it: (loss * mask).sum() / "
            f"mask.sum().clamp_min(1); or {self.do}",
        )

    def ambiguous(self, term: GlobalTerm, place: CallSite | None) -> ConfigurationError:
        """Return the error for a sum in the loss at a line that can also be a mean."""
        by = f"divided by {term.divisor:g}" if term.divisor else "multiplied by a number"
        return ConfigurationError(
            f"A sum in the loss of {self.whose} at {words(place)} is {by}, which is ambiguous.",
            evidence=f"if it is the number of samples of this {self.part}, the loss is a mean over all samples; if it "
            "is a constant, the loss is a sum times that constant",
            do="write a mean with .mean() or reduction='mean', or a sum without the number; or " + self.do,
        )

    def scaled_mean(self) -> str:
        """Return the warning of a mean that is multiplied by its number of samples, with a place for its line."""
        return (
            f"a mean in the loss of {self.whose} ({{where}}) is multiplied by a number that is also the number of "
            f"samples of this {self.part} but is treated as a constant: if it is that number, write the sum with "
            "reduction='sum' or .sum()"
        )


def words_of_model(name: str) -> LossWords:
    """Return the words for the losses of a model that ranks train together."""
    do = (
        "pass the number that the loss averages over, which is len(x) for the mean of one term per sample, to "
        "rankwise.weight(model, amount)"
    )
    return LossWords(name, "rank", "does not have the same terms on all ranks", do)


class TermReadings:
    """The readings of one model's losses, step by step; the same on every rank that reads them."""

    def __init__(self, loss_words: LossWords) -> None:
        self._words = loss_words
        self._known: dict[tuple[int, CallSite | None, int, bool], TermReading] = {}
        """By the loss, its line, the number of the term and whether it is divided."""

    def check(self, combined: GlobalLoss, place: CallSite | None) -> None:
        """Raise if a sum over a number was read differently in an earlier step, or cannot be read at all.

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
                raise self._words.ambiguous(term, place)
            if known is None:
                self._known[key] = term.reading

    def of(self, combined: GlobalLoss, number: int, place: CallSite | None) -> TermReading:
        """Return how a term is read: as in earlier steps, if there were any."""
        return self._known.get(_key(combined, number, place), combined.terms[number].reading)


def _key(combined: GlobalLoss, number: int, place: CallSite | None) -> tuple[int, CallSite | None, int, bool]:
    return combined.code, place, number, combined.terms[number].divisor > 0


def channel_length(num_ranks: int) -> int:
    """Return how many numbers are sent with each step."""
    return _BATCHES + num_ranks


class LossReports:
    """The reports of the ranks that train one model: one of each in every step."""

    def __init__(self, group: Exchange, model_name: str) -> None:
        """Open their channel.

        Called by: every rank of ``group``, in the same order.

        Args:
            group: the ranks that train the model.
            model_name: for errors.
        """
        self.num_ranks = group.world_size
        self.rows = RowLengthsInSteps()
        self._words = words_of_model(model_name)
        self.readings = TermReadings(self._words)
        self.guard: StateGuard | None = None
        self._group = group
        self._model_name = model_name
        length = channel_length(self.num_ranks)
        size = ChannelSize(length, 1, torch.float64, torch.device("cpu"))
        (self._channel,) = group.channels([size], f"loss of {model_name}")
        # Several times as fast as tensors and arrays for a few numbers.
        self._form = struct.Struct(f"={length}d")
        self._body = self._channel.body.numpy().data
        self._result = self._channel.result.numpy().data
        self._latest: tuple[Sequence[float], GlobalLoss] = (), combine((0.0,) * REPORT_LENGTH)
        """The sums of the last reports of losses, and what they say: most steps are as the one before."""

    def guard_by(self, guard: StateGuard) -> None:
        """Send the numbers of ``guard`` with the reports."""
        self.guard = guard

    def send(self, report: Sequence[float], batch: int) -> None:
        """Send this rank's report. Called by: every rank, once per step.

        Args:
            report: at most REPORT_LENGTH numbers, followed by zeros.
            batch: number of this rank's batch.
        """
        guard = None if self.guard is None else self.guard.report()
        batches = [0.0] * self.num_ranks
        batches[self._group.rank] = batch
        rest = [0.0] * (REPORT_LENGTH - len(report))
        self._channel.claim()
        self._form.pack_into(self._body, 0, *report, *rest, *(guard or _NOTHING_OF_GUARD), *batches)
        # Weights of 1: the channel's weighted sum is then the plain sum, to the last bit.
        self._channel.start(1.0, 1.0, ())

    def receive(self, verdict: LossVerdict, rows: RowLengths | None, place: CallSite | None) -> GlobalLoss:
        """Wait for the reports of all ranks of a step, and check them.

        Args:
            verdict: of this rank.
            rows: of this rank.
            place: the line of the backward; ``None``: the current one.

        Raises:
            CollectiveMismatch: they are at different batches.
            ConfigurationError: their losses are of different kinds, or over samples of different lengths.
        """
        self._channel.finish()
        sums = self._form.unpack_from(self._result)
        of_losses, batches = sums[:REPORT_LENGTH], sums[_BATCHES:]
        if of_losses != self._latest[0]:
            self._latest = of_losses, combine(of_losses)
        if len(set(batches)) > 1:
            are_all_ranks = self.num_ranks == self._group.detector.world_size
            check_same_batch(batches, self._model_name, are_all_ranks=are_all_ranks)
        if self.guard is not None:
            self.guard.note_sums(*sums[REPORT_LENGTH:_BATCHES])
        combined = self._latest[1]
        if not combined.is_alike:
            raise self._words.unlike_terms(verdict.terms)
        if combined.terms:
            self.readings.check(combined, place)
        if combined.elements is not None:
            raise _unequal_lengths(rows, combined.elements, words(place or user_call_site()))
        return combined

    def are_lost(self) -> bool:
        """Return whether some report will never arrive; raise the reason, unless the training thread has."""
        if self._group.detector.error is None:
            return False
        self._group.detector.raise_unraised()
        return True

    def sum(self, own: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of numbers that they have on their devices. Called by: every rank."""
        return self._group.all_reduce(own, what=f"weights of the loss of {self._model_name}")


def _unequal_lengths(rows: RowLengths | None, elements: float, place: str) -> ConfigurationError:
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
