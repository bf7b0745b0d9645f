# SPDX-License-Identifier: Apache-2.0
"""The loss of the backward under way, on all ranks: the weight of this rank's gradients, and whether losses agree.

Used by gradient_sync and shard, which have one per model.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from rankwise.errors import CollectiveMismatch, ConfigurationError
from rankwise.health.call_site import user_call_site, words
from rankwise.replicate.loss.amounts import is_zero
from rankwise.replicate.loss.reports import (
    MOST_TERMS,
    Mode,
    ReportChannel,
    RowLengthsInSteps,
    TermReadings,
    Verdict,
    as_expected,
    batch_in_hand,
    check_same_batch,
    report_of,
    unequal_lengths,
)
from rankwise.world.device.later import check_later

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import Amount, Exchange
    from rankwise.comm.session import Session
    from rankwise.health.call_site import CallSite
    from rankwise.replicate.loss.reports import GlobalLoss, GlobalTerm, RowLengths, TermReading
    from rankwise.replicate.loss.terms import ForwardCall
    from rankwise.replicate.state_guard.guard import StateGuard

_COUNTED_IN = {
    Mode.SAMPLES: "samples of the forward, or the amount given to rankwise.weight()",
    Mode.MEAN: "the number that the mean in the loss is over",
    Mode.SUM: "nothing, because the loss is a sum",
}
STEPS_HEARD = 3
"""How many of the first steps wait for the reports of the other ranks, whatever their losses are."""
_SAMPLES = Verdict(Mode.SAMPLES)
_NOTHING = Verdict(Mode.NOTHING)


model_numbers = itertools.count()
"""Numbers for models. Ranks train their models with the same strategies in one order, so they are the same on each."""


_Kind = tuple[Mode, tuple[tuple[str, str], ...]]


class _Left(NamedTuple):
    """What errors of a step say whose reports are received later."""

    verdict: Verdict
    rows: RowLengths | None
    place: CallSite | None
    number: int


class Microsteps:
    """The microsteps since the last exact gradient."""

    def __init__(self) -> None:
        self.is_open = False
        """Whether gradients of some microsteps wait, on every rank, for those of the last."""
        self.is_continued = False
        """Whether another microstep follows the one under way."""
        self.carried: Amount = 0.0
        """The sum of the weights of the microsteps that have been added up."""
        self.counted_in: str | None = None
        """What their weights count, in words, after the first one that counts anything."""

    def set_continued(self, value: bool) -> bool:  # noqa: FBT001 - the value to set
        """Set whether another microstep follows the one under way; return the value before."""
        before, self.is_continued = self.is_continued, value
        return before

    def put_earlier_gradients_aside(self) -> None:
        """Keep the current ``grad`` out of the next backward, unless torch does so itself."""

    def give_back_earlier(self) -> None:
        """Add the gradients that were put aside to ``grad``."""


class LossOnRanks:
    """The number that the loss of one model is a mean over, step by step."""

    def __init__(
        self,
        number: int,
        parameters: Sequence[nn.Parameter],
        group: Exchange | None,
        model_name: str,
        accumulation: Microsteps,
        *,
        reports_at_start: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """Open a channel for the ranks' reports of their losses.

        Called by: every rank of ``group``, in the same order.

        Args:
            number: of the model, the same on every rank.
            parameters: of the model.
            group: the ranks that train the model; ``None`` for a single rank.
            model_name: for errors.
            accumulation: of the model's gradients.
            reports_at_start: whether the ranks report when backward starts, not when gradients are first sent.
            device: where weights may remain that are computed there; ``None``: they are read.
        """
        self.number, self.reports_at_start = number, reports_at_start
        self._ids = set(map(id, parameters))
        self._accumulation = accumulation
        self._device, self.reads_amounts = device, device is None
        """Whether weights that are on a device are read before they are used."""
        self._num_begun = self._num_heard = 0
        """Backwards so far, for errors that are found later; and those whose reports have been received."""
        self._given_weight: Amount | None = None
        """The number that the user declared around this backward."""
        self.forward_weight: Amount | None = None
        """Samples of the latest forward, for a backward that does not pass through its output."""
        self.is_given_by_forward = self.is_given = False
        """Whether the user declares what the loss is a mean over, so that it need not be read."""
        self.is_averaged_elsewhere = False
        self.cautions: dict[Mode, str] = {}
        """Warnings by mode of the loss, of results that differ from those of one rank."""
        self.weight: Amount = 0.0
        """Of the backward under way: the number of samples, or tokens, that its loss is the mean of."""
        self.num_samples = 0.0
        """Of the forward whose backward is under way, and of the microsteps before it."""
        self._verdict = _SAMPLES
        self.is_sum = self.is_empty = False
        """Whether gradients are added up over ranks, not averaged; whether this rank has no samples of the batch."""
        self._expected_weight: Amount | None = None
        """Samples of the forward whose backward is about to run."""
        self._batch = 0
        """A number for the batch of the backward under way; 0 if it is not known."""
        self._num_ranks = 1 if group is None else group.world_size
        self._model_name = model_name
        self._combined: GlobalLoss | None = None
        self._readings = TermReadings(_ambiguous)
        self._place: CallSite | None = None
        """The line of the backward under way, if it may be needed."""
        self._rows_in_steps = RowLengthsInSteps()
        self._rows: RowLengths | None = None
        """Of the reduced tensors, if their rows are the samples."""
        self._is_reported = self._is_heard = False
        """Whether the report of this step has been sent; whether those of all ranks have been received."""
        self._kind: _Kind | None = None
        """Of the loss of the backward under way, as far as it must be the same on all ranks; ``None``: not read."""
        self._kind_before: _Kind | None = None
        self._followers: dict[_Kind | None, _Kind | None] = {}
        """By kind, the kind of the loss that followed it: losses may alternate, as those of a GAN."""
        self._left: _Left | None = None
        """Of the step before, if its reports have not been received."""
        self.guard: StateGuard | None = None
        self._on_interrupted: Callable[[], None] = lambda: None
        self._group = group
        self._channel = None if group is None else ReportChannel(group, model_name)

    def set_given_weight(self, amount: Amount | None) -> Amount | None:
        """Set the number that losses are a mean over, ``None`` to find it out; return the value before."""
        before, self._given_weight = self._given_weight, amount
        self.is_given = amount is not None or self.is_given_by_forward
        return before

    def note_forward(self, amount: Amount | None) -> None:
        """Note how many samples the latest forward had."""
        self.forward_weight = amount

    def expect_weights(self, *, by_forward: bool = False, averages_elsewhere: bool = False) -> None:
        """Say where weights come from and where they are used. Called by the strategy, before the first forward.

        Args:
            by_forward: the user gave a function that returns what the loss of a forward is a mean over.
            averages_elsewhere: servers or worker groups average this rank's results, by the weight that it sends them.
        """
        self.is_given_by_forward = by_forward
        self.is_given = by_forward or self._given_weight is not None
        self.is_averaged_elsewhere = averages_elsewhere
        if averages_elsewhere:
            self._device, self.reads_amounts = None, True

    def guard_by(self, guard: StateGuard) -> None:
        """Send the numbers of ``guard`` with the reports."""
        self.guard = guard

    def when_interrupted(self, action: Callable[[], None]) -> None:
        """Call ``action`` when an error has ended a backward."""
        self._on_interrupted = action

    def interrupt(self) -> None:
        """Note that an error has ended a backward."""
        self._on_interrupted()

    def owns(self, variable: object) -> bool:
        """Return whether something is a parameter of the model."""
        return id(variable) in self._ids

    def own(self, parameters: Iterable[nn.Parameter]) -> None:
        """Count more tensors as parameters of the model: they replace its parameters in the graph."""
        self._ids.update(map(id, parameters))

    @property
    def expected_amount(self) -> Amount | None:
        """What the loss of the next backward is a mean over, as far as that is known: given, or samples."""
        return self._expected_weight if self._given_weight is None else self._given_weight

    @property
    def is_needed(self) -> bool:
        """Whether it matters what the loss of the next backward is a mean over."""
        return self._group is not None or self.is_averaged_elsewhere or self.is_accumulated

    @property
    def is_accumulated(self) -> bool:
        """Whether the next backward is one of several that make one gradient."""
        return self._accumulation.is_continued or self._accumulation.is_open

    def check_calls(self, *unlike: ForwardCall) -> None:
        """Raise if calls of one loss have been given numbers of which one is zero: the loss has one weight.

        Args:
            unlike: two calls of different numbers; nothing if there are none.
        """
        if not unlike or self._given_weight is not None or not self.is_given_by_forward:
            return
        amounts = [call.num_samples for call in unlike]
        if any(isinstance(amount, torch.Tensor) for amount in amounts):
            first, second = (torch.as_tensor(amount, device=self._device) for amount in amounts)
            check_later((first == 0) != (second == 0), partial(_report_calls, self._model_name, self._num_begun))
        elif 0.0 in amounts:
            raise _two_amounts(self._model_name)

    def expect(
        self, verdict: Verdict, call: ForwardCall | None, session: Session | None, *, is_empty: bool | None
    ) -> None:
        """Take in the verdict on the loss whose backward is about to run.

        Args:
            verdict: of this rank.
            call: from whose outputs the loss comes.
            session: that is open.
            is_empty: whether this rank has no samples for any part of the loss; ``None``: as the model's last forward.
        """
        self._expected_weight = self.forward_weight if call is None else call.num_samples
        self._batch = batch_in_hand(session)
        self._rows = None
        if verdict.mode in (Mode.MEAN, Mode.SUM, Mode.TERMS) and self._channel is not None:
            batch = None if session is None else session.batches.latest
            self._rows = self._rows_in_steps.read(verdict.terms, call, None if batch is None else batch.num)
        if is_empty is None:
            is_empty = self._expected_weight is not None and is_zero(self._expected_weight)
        if is_empty and self._accumulation.counted_in == _COUNTED_IN[Mode.SUM]:
            # All ranks may be without samples in the last microstep: the earlier ones tell that this is a sum.
            verdict, is_empty = Verdict(Mode.SUM), False
        self._verdict = _SAMPLES if self.is_given else _NOTHING if is_empty else verdict
        self.is_sum, self.is_empty = self._verdict.mode is Mode.SUM, self._verdict.mode is Mode.NOTHING
        self._kind = _kind_of(self._verdict)
        has_lengths = self._rows is not None and not self.reads_amounts
        if self._verdict.mode in (Mode.TERMS, Mode.NOTHING) or (has_lengths and self._is_queued):
            # Later it may be unknown: on a GPU another thread runs backward.
            self._place = user_call_site()
        if (self.is_sum or self.is_empty) and not self.is_accumulated:
            # Earlier gradients are summed over ranks already; a rank without samples does not know if others sum.
            self._accumulation.put_earlier_gradients_aside()

    def report_at_start(self) -> None:
        """Report now, if the model does so. Called by: every rank, for the models that a loss comes from."""
        # Others may wait for the report of a rank without samples before backward, which has collectives of its own.
        if (self.reports_at_start or self._verdict.mode is Mode.NOTHING) and not self._accumulation.is_continued:
            self.begin(self._expected_weight)
            self.report()
            if self._device is not None and self._foresee() is None:
                self.receive()

    def exchange_terms(self) -> GlobalLoss | None:
        """Return each term on all ranks together; ``None`` if this rank has no samples.

        Called by: every rank of the group, before any node of the graph runs.
        """
        if self._verdict.mode is not Mode.TERMS:
            return None
        self.begin(self._expected_weight)
        self.report()
        return self._foresee() or self.receive()

    def _foresee(self) -> GlobalLoss | None:
        """Return the losses of all ranks without their reports, where all are as in the steps before.

        Called by: every rank of the group that computes with them, once per step, unless it receives the reports.
        """
        if self._combined is None and self._is_as_before and self._group is not None and self._device is not None:
            self._combined = as_expected(self._verdict, self._sums_on_device(self._group, self._device))
        return self._combined

    @property
    def _is_queued(self) -> bool:
        """Whether what ranks send of a step is queued on the device, so that no CPU need wait for another."""
        return self._group is not None and self._device is not None and self._group.detector.queue is not None

    @property
    def _is_as_before(self) -> bool:
        """Whether nothing but an error would follow from the reports of this step, which can be received later.

        Up to the step before all ranks had losses of one kind: if one of them has another now, it waits.
        """
        is_known = self._kind is not None and self._kind == self._followers.get(self._kind_before)
        return is_known and self._num_heard >= STEPS_HEARD and self._is_queued

    def end_step(self) -> bool:
        """Return whether the ranks that have samples add their gradients up; check their reports, now or later.

        Called by: every rank, at the end of a backward that has reduced gradients.
        """
        if self._device is not None and not self._is_heard and self._is_as_before:
            if self.guard is not None:
                self.guard.end_step()
            self._left = _Left(self._verdict, self._rows, self._place, self._num_begun)
            self._kind_before = self._kind
            return self.is_sum
        combined = self.receive()
        is_sum = self.is_sum if combined is None else combined.mode is Mode.SUM
        if self.is_empty:
            self._followers.clear()
        else:
            self._followers[self._kind_before] = self._kind
        self._kind_before = self._kind
        if self.guard is not None:
            self.guard.check()
        return is_sum

    def settle(self) -> None:
        """Check the reports of the step before, unless this rank has waited for them."""
        left, self._left = self._left, None
        if left is None or self._group is None or self._channel is None:
            return
        if self._group.detector.error is not None:
            # Some report will never arrive.
            self._group.detector.raise_unraised()
            return
        try:
            self._hear(self._group, self._channel, left)
            if self.guard is not None:
                self.guard.check()
        except (ConfigurationError, CollectiveMismatch) as error:
            where = f"found after backward {left.number} of {self._model_name}, whose gradients were used"
            raise error.supplement(where=error.where or where)  # noqa: B904 - the same one

    def is_sum_on_ranks(self) -> bool:
        """Return whether the ranks that have samples add their gradients up. Waits for their reports."""
        combined = self.receive()
        return self.is_sum if combined is None else combined.mode is Mode.SUM

    def begin(self, forward_weight: Amount | None) -> None:
        """Set the weight of the backward under way.

        Args:
            forward_weight: samples of the forward that it passes through.

        Raises:
            ConfigurationError: the number of samples is unknown.
        """
        if self._is_reported:
            return
        if self._left is not None:
            self.settle()
        if self._expected_weight is not None:
            # A loss of several forwards has one weight, whichever of them backward reaches first.
            forward_weight = self._expected_weight
        self._num_begun += 1
        num_samples = 0.0 if forward_weight is None or isinstance(forward_weight, torch.Tensor) else forward_weight
        self.num_samples = num_samples + (self.num_samples if self._accumulation.is_open else 0.0)
        if self._verdict.mode is Mode.SUM:
            self.weight = 1.0 / self._num_ranks
        elif self._verdict.mode is Mode.TERMS:
            self.weight = 1.0
        elif self._verdict.mode is Mode.MEAN:
            self.weight = self._verdict.terms[0].amount
        else:
            self.weight = self._checked(self._given_weight if self._given_weight is not None else forward_weight)

    def check_unit(self) -> None:
        """Raise if the microsteps of an accumulation cannot be added up: their weights count different things.

        Called by: the end of a backward that has computed gradients, of an accumulation that is open.
        """
        counted_in = _COUNTED_IN.get(self._verdict.mode)
        if counted_in is None:
            return
        earlier = self._accumulation.counted_in or counted_in
        if earlier != counted_in:
            raise ConfigurationError(
                "Microsteps of one accumulation weight their losses in different units.",
                evidence=f"the earlier ones count {earlier}; this one counts {counted_in}",
                do="compute the same loss in every microstep, and use rankwise.weight() for all of them or for none",
            )
        self._accumulation.counted_in = counted_in

    def report(self) -> None:
        """Report this rank's loss to the other ranks. Called by: every rank, once per step."""
        if self._channel is None or self._is_reported:
            return
        self._is_reported = True
        report = report_of(self._verdict, self._accumulation.carried + self.weight, self.num_samples, self._rows)
        self._channel.send(report, None if self.guard is None else self.guard.report(), self._batch)

    def receive(self) -> GlobalLoss | None:
        """Wait for the reports of all ranks; return ``None`` on a single rank.

        Raises:
            CollectiveMismatch: they are at different batches.
            ConfigurationError: their losses are of different kinds, or over samples of different lengths.
        """
        if self._channel is not None and self._group is not None and self._is_reported and self._combined is None:
            step = _Left(self._verdict, self._rows, self._place, self._num_begun)
            combined = self._hear(self._group, self._channel, step)
            if self._device is not None:
                combined = self._added_up(combined, self._group, self._device)
            self._combined = combined
            self._is_heard = True
            self._num_heard += 1
        return self._combined

    def _hear(self, group: Exchange, channel: ReportChannel, step: _Left) -> GlobalLoss:
        """Wait for the reports of all ranks of a step, and check them."""
        reports = channel.receive()
        if len(set(reports.batches)) > 1:
            are_all_ranks = self._num_ranks == group.detector.world_size
            check_same_batch(reports.batches, self._model_name, are_all_ranks=are_all_ranks)
        if self.guard is not None:
            self.guard.take(*reports.guards)
        combined = reports.loss
        if not combined.is_alike:
            raise self._unlike(step.verdict)
        if combined.terms:
            self._readings.check(combined, step.place)
        if combined.elements is not None:
            raise unequal_lengths(step.rows, combined.elements, words(step.place or user_call_site()))
        return combined

    def _added_up(self, combined: GlobalLoss, group: Exchange, device: torch.device) -> GlobalLoss:
        """Return the losses of all ranks with the numbers that ranks have on their devices.

        Called by: every rank of the group that needs them: all, or those of a loss of several terms and those without
        samples.
        """
        is_of_terms = combined.mode is Mode.TERMS
        has_terms = is_of_terms and (self._is_queued or any(math.isnan(term.amount) for term in combined.terms))
        if not (has_terms or (self.reports_at_start and (self._is_queued or math.isnan(combined.weight)))):
            return combined
        sums = self._sums_on_device(group, device)
        terms = tuple(term._replace(amount=sums[2 + number]) for number, term in enumerate(combined.terms))
        return combined._replace(weight=sums[0], terms=terms)

    def _sums_on_device(self, group: Exchange, device: torch.device) -> torch.Tensor:
        """Return [2 + MOST_TERMS]: of all ranks the weights, how many have samples, and the amounts of the terms."""
        own = torch.zeros(2 + MOST_TERMS, dtype=torch.float64, device=device)
        amounts = [term.amount for term in self._verdict.terms] if self._verdict.mode is Mode.TERMS else []
        numbers = (self._accumulation.carried + self.weight, float(not self.is_empty), *amounts)
        for place, amount in zip(own, numbers, strict=False):
            place.fill_(amount)
        return group.all_reduce(own, what=f"weights of the loss of {self._model_name}")

    def _checked(self, weight: Amount | None) -> Amount:
        if isinstance(weight, torch.Tensor):
            if self._device is not None:
                check_later(~(torch.isfinite(weight) & (weight >= 0)), partial(_report_weight, weight, self._num_begun))
                return weight
            weight = float(weight)
        return _known(weight)

    def counted(self, total: float) -> float:
        """Return the weight of the gradients among servers or worker groups: samples, if ``total`` counts none."""
        combined = self._combined
        mode = self._verdict.mode if combined is None else combined.mode
        if mode not in (Mode.SUM, Mode.TERMS):
            return total
        return (self.num_samples if combined is None else combined.num_samples) or total

    def end(self) -> None:
        """Forget the loss of a backward that has ended, or did not reach this model."""
        if (self.is_sum or self.is_empty) and not self.is_accumulated:
            self._accumulation.give_back_earlier()
        self._verdict = _SAMPLES
        self.is_sum = self.is_empty = False
        self._expected_weight = None
        self._batch = 0
        self._combined = None
        self._is_reported = self._is_heard = False
        self._kind = None

    def reading(self, number: int) -> TermReading:
        """Return how a term of the loss under way is read, in this step or in earlier ones."""
        combined = self._combined
        if combined is None:
            return "mean"
        return self._readings.of(combined, number, self._place)

    def _unlike(self, verdict: Verdict) -> ConfigurationError:
        own = ", ".join(f"{term.kind} ({term.operation})" for term in verdict.terms) or verdict.mode.name.lower()
        return ConfigurationError(
            f"The loss of {self._model_name} does not have the same terms on all ranks.",
            evidence=f"on this rank: {own}",
            do="compute every term on every rank, also of classes without samples there: (loss * mask).sum() / "
            "mask.sum().clamp_min(1); for the mean of one term per sample, put backward() into "
            "`with rankwise.weight(model, len(x))`",
        )


def _ambiguous(term: GlobalTerm, place: CallSite | None) -> ConfigurationError:
    return ConfigurationError(
        f"A sum in the loss at {words(place)} is divided by {term.divisor:g}, which is ambiguous.",
        evidence="if it is this rank's number of samples, the loss is a mean over all ranks' samples; if it is a "
        "constant, the loss is their sum over that constant",
        do="write a mean with .mean() or reduction='mean'; or pass the number that the loss averages over to "
        "rankwise.weight(model, amount)",
    )


def _kind_of(verdict: Verdict) -> _Kind | None:
    """Return what must be the same on all ranks; ``None`` if this rank alone cannot tell what its gradients count."""
    if verdict.mode is not Mode.TERMS:
        return None if verdict.mode is Mode.NOTHING else (verdict.mode, ())
    if any(term.kind == "sum" and (term.divisor or term.is_odd) for term in verdict.terms):
        return None
    return verdict.mode, tuple((term.kind, term.operation) for term in verdict.terms)


def _known(weight: float | None) -> float:
    if weight is None:
        raise ConfigurationError(
            "Cannot tell how many samples this loss averages over.",
            evidence="the replicated model itself was not called, or was called without a tensor argument",
            do="call loss.backward() within `with rankwise.weight(model, num_samples):`",
        )
    if not (math.isfinite(weight) and weight >= 0):
        raise _not_a_weight(weight)
    return float(weight)


def _two_amounts(model_name: str, where: str | None = None) -> ConfigurationError:
    return ConfigurationError(
        f"A loss of several forward passes of {model_name} has samples for one of them and none for another, by the "
        "function given as weight=.",
        where=where,
        do="omit weight=, so that each mean in the loss counts by its own samples; or call backward() within "
        "`with rankwise.weight(model, amount):`",
    )


def _report_calls(model_name: str, number: int) -> None:
    """Raise for calls whose numbers are on a device, once one is known to be zero and another not."""
    raise _two_amounts(model_name, f"found after backward {number} of the model")


def _not_a_weight(weight: float, where: str | None = None) -> ConfigurationError:
    return ConfigurationError(
        f"The weight of a backward must be at least 0, got {weight}.",
        where=where,
        do="pass the number of samples or tokens that the loss averages over",
    )


def _report_weight(weight: torch.Tensor, number: int) -> None:
    """Raise for a weight on a device, once that is known to be none."""
    raise _not_a_weight(float(weight), f"found after backward {number} of the model, which used it")
