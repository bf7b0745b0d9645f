# SPDX-License-Identifier: Apache-2.0
"""The loss of a step on all ranks of a pipeline and of its copies: the weight of the gradients, and the value returned.

The last stage reads the loss of each micro-batch as soon as it is computed. The share of a micro-batch in the whole is
known only after the last one, when gradients of the first have already gone to other stages. So each is scaled by the
number it is a mean over relative to the first one's: one factor for the gradients of all of them remains. The last
stages of the copies exchange their readings, and each sends the result to the other stages of its copy. In order: the
values; the weight of a step; the reader, which sends nothing; the loss on all ranks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from rankwise.comm.session import current
from rankwise.health.call_site import user_call_site, words
from rankwise.log import warn
from rankwise.replicate.loss.graph import forward_call, mark_output, plain, ratio
from rankwise.replicate.loss.hooks import warn_once
from rankwise.replicate.loss.loss_on_ranks import model_numbers
from rankwise.replicate.loss.reports import (
    MOST_TERMS,
    REPORT_LENGTH,
    LossVerdict,
    LossWords,
    Mode,
    RowLengthsInSteps,
    TermReadings,
    combine,
    report_of,
    verdict_of,
)
from rankwise.replicate.loss.terms import LossModel, LossReader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import Amount, Exchange
    from rankwise.health.call_site import CallSite
    from rankwise.pipeline.executor import MicroBatch
    from rankwise.replicate.loss.batch_statistics import Statistic
    from rankwise.replicate.loss.reports import GlobalLoss, RowLengths
    from rankwise.replicate.loss.terms import Term

_OF_PIPELINE = "loss of the pipeline"
_WORDS = LossWords(
    "the pipeline", "micro-batch", "does not have the same terms for all micro-batches", "pass weight= to pipeline()"
)
LOSS_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INSTEAD = (
    "micro-batches are averaged by samples, which differs from the result of one device; return one mean "
    "or one sum, or pass weight= to pipeline(): a function of a micro-batch's target that returns the "
    "number its loss averages over"
)
_OF_PADDING = (
    "the mean in the loss of the pipeline ({where}) averages over different numbers of elements per "
    "sample in different copies of the pipeline, as when each pads to its own longest sample: one device "
    "would pad all samples to one length, and its mean would differ; exclude padding ((loss * "
    "mask).sum() / mask.sum(), ignore_index), pad to a fixed length, or pass weight= to pipeline()"
)


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

    def plus(
        self,
        counted: Amount,
        amounts: Sequence[Amount],
        report: Sequence[float],
        *,
        is_unlike: bool,
        has_penalty: bool,
    ) -> CopyLosses:
        """Return the same with another micro-batch."""
        return CopyLosses(
            self.counted + counted,
            self.num_unlike + is_unlike,
            self.num_penalties + has_penalty,
            _sum(self.amounts, amounts),
            _sum(self.reports, report),
        )

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
    multiples: tuple[Amount | None, ...] = ()
    """What each copy is a mean over, per sample, as a multiple of the first one's."""

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
            factor = torch.where(own.counted == 0, 1.0, own.num_samples / own.counted)
        else:
            factor = own.num_samples / own.counted if own.counted else 1.0
        weight, total = own.num_samples, combined.num_samples
        if not self.by_samples:
            # Multiples of the samples, so that a mean over samples is bitwise the same.
            weight = own.num_samples * cast("Amount", self.multiples[place])
            total = sum(one.amounts[0] for one in copies)
        return StepWeight(factor, factor * weight, weight, total)


def settled(copies: Sequence[CopyLosses], readings: TermReadings, place: CallSite | None) -> StepLosses | None:
    """Return the losses of all copies together; ``None`` if they do not have the same terms.

    Called by: the last stage of each copy, with the same ``copies``. ``readings`` are those of divided sums in earlier
    steps, and ``place`` is the line of the step.

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
    first: Sequence[Amount] | None = None
    multiples: list[Amount | None] = []
    for one in copies:
        multiple, first = _multiple(one.amounts, one.num_samples, first)
        multiples.append(multiple)
    is_sum = combined.mode is Mode.SUM or (bool(reads) and reads <= {"sum", "constant"})
    is_mean = combined.mode is Mode.MEAN or (bool(reads) and reads <= {"mean", "share"})
    by_samples = (
        any(copy.num_unlike for copy in copies)
        or (is_sum and any(copy.num_penalties for copy in copies))
        or not (is_sum or (is_mean and None not in multiples))
    )
    return StepLosses(combined, is_sum and not by_samples, by_samples, tuple(multiples))


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


def _multiple(
    amounts: Sequence[Amount], num_samples: float, first: Sequence[Amount] | None
) -> tuple[Amount | None, Sequence[Amount] | None]:
    """Return what terms are means over, per sample, as a multiple of ``first``, those of the first ones that count.

    Args:
        amounts: the number each term is a mean over; on a device there is one term.
        num_samples: that they are of.
        first: the amounts per sample of the first ones; ``None`` before these.

    Returns:
        The multiple, exactly 1.0 if close to it, ``None`` if no one number scales all terms; and the next ``first``.
    """
    per_sample = tuple(amount / max(num_samples, 1.0) for amount in amounts)
    there = per_sample[0]
    if isinstance(there, torch.Tensor):
        known = there if first is None else torch.as_tensor(first[0], dtype=there.dtype, device=there.device)
        known = torch.where(known == 0, there, known)
        return ratio(there, known), (known,)
    if not any(per_sample):
        return 0.0, first
    pairs = list(zip(per_sample, first or per_sample, strict=True))
    multiple = next(one / other for one, other in pairs if other)
    if not all(math.isclose(one, other * multiple, rel_tol=1e-9) for one, other in pairs):
        return None, first
    return 1.0 if math.isclose(multiple, 1.0, rel_tol=1e-12) else multiple, first or per_sample


class MicroBatchLosses(LossModel):
    """The losses of one copy's micro-batches, step by step."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take the parameters of this rank's stages. Called by: every rank, in the order of other strategies' calls."""
        super().__init__(next(model_numbers), parameters)
        self.verdict = LossVerdict(Mode.SAMPLES)
        """On the latest loss."""
        self.rows: RowLengths | None = None
        """Of the latest loss, where padding may count in it."""
        self._is_unlike = False
        """Whether terms of a loss have been means over different numbers: micro-batches are then averaged by samples,
        in all later steps too."""
        self.of_copy = NOTHING
        """The losses since :meth:`begin` together."""
        self._first: Sequence[Amount] | None = None
        """Of the first micro-batch that counts: the number each term is a mean over, per sample."""
        self._num_samples = 0
        self._are_samples_first = False
        """Whether a loader gave the batch, so that its first dim is known to be the sample."""
        self._num_odd = 0
        self._rows_in_steps = RowLengthsInSteps()

    def begin(self, num_samples: int) -> None:
        """Begin a step with a batch of so many samples."""
        self.of_copy, self._first, self._num_odd = NOTHING, None, 0
        self._num_samples = num_samples
        batch = current().batches.latest
        self._are_samples_first = batch is not None and batch.num == num_samples

    def scaled_mean(self) -> Term | None:
        """Return a mean that is multiplied by each micro-batch's number of samples, if there is one."""
        is_always = 0 < self._num_odd == self.of_copy.reports[2]
        return next((term for term in self.verdict.terms if _is_scaled_mean(term)), None) if is_always else None

    def scale(self, loss: torch.Tensor, output: object, part: MicroBatch) -> Amount:
        """Return the factor of the loss of a micro-batch, zero if nothing in it counts.

        Called by: ranks with the last stage, before backward.
        """
        terms = self._terms(loss, output, part)
        verdict = verdict_of(terms)
        if len(verdict.terms) > 1:
            # Whether one number scales all terms decides what is computed next.
            verdict = verdict.read()
        self.verdict = verdict
        self._num_odd += any(map(_is_scaled_mean, terms))
        has_penalty = any(term.kind == "same" for term in terms)
        amounts = _amounts(verdict, has_penalty=has_penalty)
        are_sums = all(term.kind == "sum" and not term.divisor for term in verdict.terms)
        if verdict.mode is not Mode.SAMPLES and are_sums and not has_penalty:
            scale: Amount = 1.0
            counted: Amount = float(self._num_samples)
        else:
            multiple = self._multiple_of_first(amounts, part.num_samples)
            scale, counted = part.share * multiple, part.num_samples * multiple
        is_unlike = amounts is None or (self._is_unlike and len(amounts) > 1)
        own = amounts or (float(part.num_samples),)
        report = report_of(verdict, own[0], float(part.num_samples), self.rows)
        self.of_copy = self.of_copy.plus(counted, own, report, is_unlike=is_unlike, has_penalty=has_penalty)
        return scale

    def _terms(self, loss: torch.Tensor, output: object, part: MicroBatch) -> list[Term]:
        if loss.grad_fn is None:
            return []
        call = forward_call(self.number, None, part.leaves, {})
        mark_output(output, call)
        reader = LossReader((self,))
        reader.read(loss)
        self.rows = self._rows_in_steps.read(reader.terms, call, part.num_samples if self._are_samples_first else None)
        return reader.terms

    def _multiple_of_first(self, amounts: tuple[Amount, ...] | None, num_samples: int) -> Amount:
        """Return what a micro-batch is a mean over, per sample, as a multiple of the first one's."""
        if amounts is None or (self._is_unlike and len(amounts) != 1):
            return 1.0
        if self._first is not None and len(amounts) != len(self._first):
            # Losses of different terms are an error once all are known.
            return 1.0
        multiple, self._first = _multiple(amounts, num_samples, self._first)
        self._is_unlike = self._is_unlike or multiple is None
        return 1.0 if multiple is None else multiple


def _amounts(verdict: LossVerdict, *, has_penalty: bool) -> tuple[Amount, ...] | None:
    """Return the number each term of a loss is a mean over; ``None`` if one factor cannot scale all of them."""
    if verdict.mode is Mode.MEAN:
        return (verdict.terms[0].amount,)
    undivided = [term for term in verdict.terms if term.kind == "sum" and not term.divisor]
    has_mean = any(term.kind == "mean" for term in verdict.terms)
    if verdict.mode is Mode.SAMPLES or (undivided and (has_mean or has_penalty)):
        return None
    return tuple(term.amount for term in verdict.terms)


def _is_scaled_mean(term: Term) -> bool:
    return term.is_odd and term.kind == "mean"


def _sum(some: Sequence[Any], others: Sequence[Any]) -> tuple[Any, ...]:
    """Return the sum of two rows of numbers, of which the second may be shorter."""
    num = len(others)
    return *(one + other for one, other in zip(some[:num], others, strict=True)), *some[num:]


class LossOnStages:
    """The loss of one pipeline, step by step."""

    def __init__(
        self,
        losses: MicroBatchLosses | None,
        along: Exchange | None,
        copies: Exchange | None,
        *,
        last_place: int,
        cautions: Mapping[Mode, str],
        device: torch.device,
    ) -> None:
        """Connect the reader of the losses, on ranks with the last stage, with the other ranks.

        Args:
            losses: ``None`` on ranks without the last stage.
            along: the ranks of the pipeline; ``None`` for one rank.
            copies: the ranks with the same stages; ``None`` for one copy.
            last_place: of the last stage, along the pipeline.
            cautions: a warning by mode of a loss.
            device: of the loss.
        """
        self._losses = losses
        self._along = along
        self._copies = copies
        self._last_place = last_place
        self._cautions = cautions
        self._device = device
        self._readings = TermReadings(_WORDS)
        self._has_warned = False
        self._dtype: torch.dtype | None = None

    def agree(self, losses: Sequence[torch.Tensor]) -> tuple[StepWeight, torch.Tensor]:
        """Return the weight of the gradients of a step, and its loss, from the scaled losses of the micro-batches.

        Called by: every rank of the pipeline and of its copies, also where a copy had no samples.

        Raises:
            ConfigurationError: on the last stages, the losses of the micro-batches have different terms, or are
                ambiguous.
        """
        step = NO_STEP if self._losses is None else self._settle(self._losses)
        loss = self._sum(losses)
        if isinstance(step.factor, torch.Tensor) or step.factor != 1.0:
            loss = loss * step.factor
        if self._along is None:
            return step, loss
        # One message for both, except where the loss would have to be waited for.
        is_here = self._device.type == "cpu"
        own = [
            *(0.0 if number is None else plain(number) for number in step),
            float(LOSS_DTYPES.index(loss.dtype)),
            float(loss) if is_here else 0.0,
        ]
        message = torch.tensor(own, dtype=torch.float64)
        found = self._along.broadcast(message, self._last_place, what="loss of the pipeline, and what it counts")
        *numbers, code, value = found.tolist()
        dtype = LOSS_DTYPES[round(code)]
        if is_here:
            return StepWeight(*numbers), torch.tensor(value, dtype=dtype)
        if math.isnan(numbers[0]):
            return self._from_device(self._along, step, loss, dtype)
        return StepWeight(*numbers), self._along.broadcast(loss.to(dtype), self._last_place, what=_OF_PIPELINE)

    def _from_device(
        self, along: Exchange, step: StepWeight, loss: torch.Tensor, dtype: torch.dtype
    ) -> tuple[StepWeight, torch.Tensor]:
        """Return the weight and the loss of the last stage, which are on its device. Called by: every rank."""
        message = torch.zeros(len(step) + 1, dtype=torch.float64, device=self._device)
        for place, number in zip(message, (*step, loss), strict=True):
            if number is not None:
                place.fill_(number)
        *numbers, value = along.broadcast(message, self._last_place, what=_OF_PIPELINE)
        return StepWeight(*numbers), value.to(dtype)

    def value(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the loss of a step whose weight is known. Called by: every rank of the pipeline."""
        loss = self._sum(losses)
        if self._along is None:
            return loss
        if self._dtype is None:
            known = torch.tensor([LOSS_DTYPES.index(loss.dtype)], device=self._device)
            self._dtype = LOSS_DTYPES[int(self._along.broadcast(known, self._last_place, what="dtype of the loss"))]
        return self._along.broadcast(loss.to(self._dtype), self._last_place, what=_OF_PIPELINE)

    def warn_of_statistic(self, statistic: Statistic) -> None:
        """Warn of a statistic of a micro-batch, unless its loss was warned about."""
        if self._has_warned or (self._copies is not None and self._copies.rank > 0):
            return
        do = "" if self._copies is not None else ", or pass micro_batches=1"
        warn_once(
            statistic.place,
            f"{statistic.name} at {statistic.place} combines the samples of a micro-batch, and the loss of the "
            "pipeline ({where}) depends on the result otherwise than as a mean or a sum over samples: on one device it "
            "would combine those of the whole batch; compute it from the whole batch before the step, and pass it in "
            f"the target, one row per sample{do}",
            all_ranks=True,
        )

    def _sum(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(losses)).sum() if losses else torch.zeros((), device=self._device)

    def _settle(self, losses: MicroBatchLosses) -> StepWeight:
        place, copies = 0, [losses.of_copy]
        if self._copies is not None:
            place = self._copies.rank
            numbers = torch.tensor(losses.of_copy.numbers(), dtype=torch.float64)
            found = self._copies.all_gather(numbers, what="losses of the copies of a pipeline")
            copies = [CopyLosses.of(one) for one in found.tolist()]
            if any(math.isnan(one.amounts[0]) for one in copies):
                there = losses.of_copy.on_device(self._device)
                found = self._copies.all_gather(there, what="amounts of the copies of a pipeline")
                copies = [one.with_those(row) for one, row in zip(copies, found, strict=True)]
        line = user_call_site()
        together = settled(copies, self._readings, line)
        if together is None:
            raise _WORDS.unlike_terms(losses.verdict.terms)
        # The last stage of the first copy warns for all.
        if place == 0 and losses.of_copy is not NOTHING:
            self._warn(losses, together, line)
        return together.weight_of(copies, place)

    def _warn(self, losses: MicroBatchLosses, together: StepLosses, line: CallSite | None) -> None:
        mode = Mode.SUM if together.is_sum else together.combined.mode
        if mode in self._cautions:
            warn_once(mode.name, self._cautions[mode], all_ranks=True)
        if together.combined.num_active < 2:  # noqa: PLR2004 - one micro-batch is the batch
            return
        scaled = losses.scaled_mean()
        if scaled is not None and not together.by_samples:
            warn_once(scaled.operation, _WORDS.scaled_mean(), all_ranks=True)
        if together.combined.elements is not None:
            warn_once("padding", _OF_PADDING, all_ranks=True)
        if together.by_samples and losses.verdict.terms and not self._has_warned:
            self._has_warned = True
            unknown = losses.verdict.unknown
            found = "adds terms that are means over different numbers, or means and sums"
            if unknown is not None:
                found = f"is neither a mean nor a sum over samples because of {unknown.operation}"
            warn(f"the loss of the pipeline ({words(line)}) {found}: {_INSTEAD}", all_ranks=True)
