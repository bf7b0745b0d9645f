# SPDX-License-Identifier: Apache-2.0
"""The loss of the backward under way, on all ranks: the weight of this rank's gradients, and whether losses agree.

In order: what is declared, one step, the steps before it, and the loss of a model. Used by gradient_sync and shard,
which have one per model.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch

from rankwise.comm.current_batch import batch_in_hand
from rankwise.errors import CollectiveMismatch, ConfigurationError
from rankwise.health.call_site import user_call_site
from rankwise.replicate.loss.graph import check_weight, is_zero
from rankwise.replicate.loss.reports import (
    MOST_TERMS,
    LossReports,
    LossVerdict,
    Mode,
    as_expected,
    report_of,
)
from rankwise.replicate.loss.terms import LossModel
from rankwise.world.device.streams import check_later

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import Amount, Exchange
    from rankwise.comm.session import Session
    from rankwise.health.call_site import CallSite
    from rankwise.replicate.loss.graph import ForwardCall
    from rankwise.replicate.loss.reports import GlobalLoss, RowLengths, TermReading
    from rankwise.replicate.no_sync_and_weight import Microsteps
    from rankwise.replicate.state_guard.guard import StateGuard

_COUNTED_IN = {
    Mode.SAMPLES: "samples of the forward, or the amount given to rankwise.weight()",
    Mode.MEAN: "the number that the mean in the loss is over",
    Mode.SUM: "nothing, because the loss is a sum",
}
WAITING_STEPS = 3
"""How many of the first steps wait for the reports of the other ranks, whatever their losses are."""
_SAMPLES = LossVerdict(Mode.SAMPLES)
_NOTHING = LossVerdict(Mode.NOTHING)


model_numbers = itertools.count()
"""Numbers for models. Ranks train their models with the same strategies in one order, so they are the same on each."""


_Kind = tuple[Mode, tuple[tuple[str, str], ...]]
"""What must be the same on all ranks of a loss."""


@dataclass(slots=True)
class _Declared:
    """What the strategy and the script declare about the losses of a model."""

    device: torch.device | None
    """Where weights may remain that are computed there; ``None``: they are read before they are used."""
    reports_at_start: bool
    """Whether the ranks report when backward starts, not when gradients are first sent."""
    is_queued: bool
    """Whether what ranks send of a step is queued on the device, so that no CPU need wait for another."""
    is_averaged_elsewhere: bool = False
    """Whether servers or worker groups average this rank's results, by the weight that it sends them."""
    is_given_by_forward: bool = False
    """Whether a function of the forward's arguments returns what the loss is a mean over."""
    weight: Amount | None = None
    """The number that the user declared around this backward."""
    is_given: bool = False
    """Whether either says what the loss is a mean over, so that it need not be read."""
    on_interrupted: Callable[[], None] = lambda: None
    """Called when an error has ended a backward."""


@dataclass(slots=True)
class _Step:
    """One backward, from its call until its gradients are exact and its report is compared."""

    expected_weight: Amount | None = None
    """Samples of the forward whose backward is about to run."""
    expected_amount: Amount | None = None
    """What its loss is a mean over, as far as that is known: given, or samples."""
    batch: int = 0
    """A number for its batch; 0 if it is not known."""
    is_expected: bool = False
    """Whether its loss has been read."""
    verdict: LossVerdict = _SAMPLES
    rows: RowLengths | None = None
    """Of the reduced tensors, if their rows are the samples."""
    place: CallSite | None = None
    """Its line, if it may be needed."""
    number: int = 0
    """How many backwards of the model there have been, for errors that are found later."""
    is_reported: bool = False
    """Whether this rank's report has been sent."""
    is_received: bool = False
    """Whether those of all ranks have been received."""
    combined: GlobalLoss | None = None
    """The losses of all ranks, as far as they are known."""

    def kind(self) -> _Kind | None:
        """Return what must be the same on all ranks; ``None`` if this rank alone cannot tell what gradients count."""
        mode, terms = self.verdict
        if mode is Mode.NOTHING or not self.is_expected:
            return None
        if mode is not Mode.TERMS:
            return mode, ()
        if any(term.kind == "sum" and (term.divisor or term.is_odd) for term in terms):
            return None
        return mode, tuple((term.kind, term.operation) for term in terms)


class _EarlierSteps:
    """The steps of a model so far, which tell whether the reports of the next one may be received later."""

    def __init__(self) -> None:
        self.unsettled: _Step | None = None
        """The step before, if its reports have not been received."""
        self._num_received = 0
        self._kind: _Kind | None = None
        """Of the step before."""
        self._followers: dict[_Kind | None, _Kind | None] = {}
        """By kind, the kind of the loss that followed it: losses may alternate, as those of a GAN."""

    def are_like(self, step: _Step) -> bool:
        """Return whether nothing but an error would follow from the reports of a step.

        Up to the step before all ranks had losses of one kind: if one of them has another now, it waits.
        """
        kind = step.kind()
        return kind is not None and kind == self._followers.get(self._kind) and self._num_received >= WAITING_STEPS

    def note_received(self) -> None:
        """Note that the reports of all ranks have been received."""
        self._num_received += 1

    def add(self, step: _Step, *, is_settled: bool) -> None:
        """Note a step that has ended, whose reports are compared already, or before the next one."""
        kind = step.kind()
        if not is_settled:
            self.unsettled = step
        elif step.verdict.mode is Mode.NOTHING:
            self._followers.clear()
        else:
            self._followers[self._kind] = kind
        self._kind = kind

    def pop_unsettled(self) -> _Step | None:
        """Return the step whose reports have not been compared, once."""
        step, self.unsettled = self.unsettled, None
        return step


class LossOnRanks(LossModel):
    """The number that the loss of one model is a mean over, step by step.

    Its many fields are what a strategy sets once, and what its backward reads in the step under way.
    """

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
        super().__init__(number, parameters)
        is_queued = group is not None and device is not None and group.detector.queue is not None
        self.declared = _Declared(device, reports_at_start, is_queued)
        self.cautions: dict[Mode, str] = {}
        """Warnings by mode of the loss, of results that differ from those of one rank."""
        self.forward_weight: Amount | None = None
        """Samples of the latest forward, for a backward that does not pass through its output."""
        self.step = _Step()
        """The backward under way."""
        self.weight: Amount = 0.0
        """Of the backward under way: the number of samples, or tokens, that its loss is the mean of."""
        self.num_samples = 0.0
        """Of the forward whose backward is under way, and of the microsteps before it."""
        self.is_sum = self.is_empty = False
        """Whether gradients are added up over ranks, not averaged; whether this rank has no samples of the batch."""
        self.reports = None if group is None else LossReports(group, model_name)
        """``None`` for a single rank."""
        self.model_name = model_name
        self._accumulation = accumulation
        self._earlier = _EarlierSteps()
        self._num_begun = 0

    # -- what is declared --------------------------------------------------------------------------

    def set_given_weight(self, amount: Amount | None) -> Amount | None:
        """Set the number that losses are a mean over, ``None`` to find it out; return the value before."""
        declared = self.declared
        before, declared.weight = declared.weight, amount
        declared.is_given = amount is not None or declared.is_given_by_forward
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
        declared = self.declared
        declared.is_given_by_forward = by_forward
        declared.is_given = by_forward or declared.weight is not None
        declared.is_averaged_elsewhere = averages_elsewhere
        if averages_elsewhere:
            declared.device, declared.is_queued = None, False

    def guard_by(self, guard: StateGuard) -> None:
        """Send the numbers of ``guard`` with the reports."""
        if self.reports is not None:
            self.reports.guard_by(guard)

    def when_interrupted(self, action: Callable[[], None]) -> None:
        """Call ``action`` when an error has ended a backward."""
        self.declared.on_interrupted = action

    @property
    def is_accumulated(self) -> bool:
        """Whether the next backward is one of several that make one gradient."""
        return self._accumulation.is_continued or self._accumulation.is_open

    def check_calls(self, unlike: tuple[ForwardCall, ForwardCall] | None) -> None:
        """Raise if two calls of one loss have been given numbers of which one is zero: the loss has one weight."""
        if unlike is None or self.declared.weight is not None or not self.declared.is_given_by_forward:
            return
        amounts = [call.num_samples for call in unlike]
        if any(isinstance(amount, torch.Tensor) for amount in amounts):
            first, second = (torch.as_tensor(amount, device=self.declared.device) for amount in amounts)
            check_later((first == 0) != (second == 0), partial(_refuse_calls, self.model_name, self._num_begun))
        elif 0.0 in amounts:
            _refuse_calls(self.model_name)

    # -- one step ----------------------------------------------------------------------------------

    def expect(
        self, verdict: LossVerdict, call: ForwardCall | None, session: Session | None, *, is_empty: bool | None
    ) -> None:
        """Store the verdict on the loss whose backward is about to run.

        Args:
            verdict: of this rank.
            call: from whose outputs the loss comes.
            session: that is open.
            is_empty: whether this rank has no samples for any part of the loss; ``None``: as the model's last forward.
        """
        expected, given = self.forward_weight if call is None else call.num_samples, self.declared.weight
        amount = expected if given is None else given
        batches = None if session is None else session.batches
        current = None if batches is None else batches.current
        self.step = step = _Step(expected, amount, batch_in_hand(current), is_expected=True)
        if self.reports is not None and verdict.mode in (Mode.MEAN, Mode.SUM, Mode.TERMS):
            batch = None if batches is None else batches.latest
            step.rows = self.reports.rows.read(verdict.terms, call, None if batch is None else batch.num)
        if is_empty is None:
            is_empty = expected is not None and is_zero(expected)
        if is_empty and self._accumulation.counted_in == _COUNTED_IN[Mode.SUM]:
            # All ranks may be without samples in the last microstep: the earlier ones tell that this is a sum.
            verdict, is_empty = LossVerdict(Mode.SUM), False
        step.verdict = _SAMPLES if self.declared.is_given else _NOTHING if is_empty else verdict
        mode = step.verdict.mode
        self.is_sum, self.is_empty = mode is Mode.SUM, mode is Mode.NOTHING
        if mode in (Mode.TERMS, Mode.NOTHING) or (step.rows is not None and self.declared.is_queued):
            # Later it may be unknown: on a GPU another thread runs backward.
            step.place = user_call_site()
        if (self.is_sum or self.is_empty) and not self.is_accumulated:
            # Earlier gradients are summed over ranks already; a rank without samples does not know if others sum.
            self._accumulation.put_earlier_gradients_aside()

    def report_at_start(self) -> None:
        """Report before backward. Called by: every rank, for models that report at start or have no samples."""
        # Others may wait for the report of a rank without samples before backward, which has collectives of its own.
        if not self._accumulation.is_continued:
            self.begin(self.step.expected_weight)
            self.report()
            if self.declared.device is not None and self._foresee() is None:
                self.receive()

    def exchange_terms(self) -> GlobalLoss | None:
        """Return each term on all ranks together; ``None`` if this rank has no samples.

        Called by: every rank of the group, before any node of the graph runs.
        """
        if self.step.verdict.mode is not Mode.TERMS:
            return None
        self.begin(self.step.expected_weight)
        self.report()
        return self._foresee() or self.receive()

    def begin(self, forward_weight: Amount | None) -> None:
        """Set the weight of the backward under way.

        Args:
            forward_weight: samples of the forward that it passes through.

        Raises:
            ConfigurationError: the number of samples is unknown.
        """
        step, mode = self.step, self.step.verdict.mode
        if step.is_reported:
            return
        if self._earlier.unsettled is not None:
            self.settle()
        if step.expected_weight is not None:
            # A loss of several forwards has one weight, whichever of them backward reaches first.
            forward_weight = step.expected_weight
        self._num_begun = step.number = self._num_begun + 1
        num_samples = 0.0 if forward_weight is None or isinstance(forward_weight, torch.Tensor) else forward_weight
        self.num_samples = num_samples + (self.num_samples if self._accumulation.is_open else 0.0)
        if mode is Mode.SUM:
            self.weight = 1.0 if self.reports is None else 1.0 / self.reports.num_ranks
        elif mode is Mode.TERMS:
            self.weight = 1.0
        elif mode is Mode.MEAN:
            self.weight = step.verdict.terms[0].amount
        else:
            self.weight = self._checked(self.declared.weight if self.declared.weight is not None else forward_weight)

    def check_unit(self) -> None:
        """Raise if the microsteps of an accumulation cannot be added up: their weights count different things.

        Called by: the end of a backward that has computed gradients, of an accumulation that is open.
        """
        counted_in = _COUNTED_IN.get(self.step.verdict.mode)
        if counted_in is not None:
            self._accumulation.count_in(counted_in)

    def report(self) -> None:
        """Report this rank's loss to the other ranks. Called by: every rank, once per step."""
        step = self.step
        if self.reports is None or step.is_reported:
            return
        step.is_reported = True
        report = report_of(step.verdict, self._accumulation.carried + self.weight, self.num_samples, step.rows)
        self.reports.send(report, step.batch)

    def receive(self) -> GlobalLoss | None:
        """Wait for the reports of all ranks; return ``None`` on a single rank.

        Raises:
            CollectiveMismatch: they are at different batches.
            ConfigurationError: their losses are of different kinds, or over samples of different lengths.
        """
        step = self.step
        if self.reports is not None and step.is_reported and step.combined is None:
            combined = self.reports.receive(step.verdict, step.rows, step.place)
            if self.declared.device is not None and self._has_numbers_on_device(combined):
                # Called by: all ranks, or those of a loss of several terms and those without samples.
                sums = self._sums_on_device()
                terms = tuple(term._replace(amount=sums[2 + number]) for number, term in enumerate(combined.terms))
                combined = combined._replace(weight=sums[0], terms=terms)
            step.combined = combined
            step.is_received = True
            self._earlier.note_received()
        return step.combined

    def is_sum_on_ranks(self) -> bool:
        """Return whether the ranks that have samples add their gradients up. Waits for their reports."""
        combined = self.receive()
        return self.is_sum if combined is None else combined.mode is Mode.SUM

    def end_step(self) -> bool:
        """Return whether the ranks that have samples add their gradients up; check their reports, now or later.

        Called by: every rank, at the end of a backward that has reduced gradients.
        """
        step, guard = self.step, None if self.reports is None else self.reports.guard
        if self.declared.is_queued and not step.is_received and self._earlier.are_like(step):
            if guard is not None:
                guard.end_step()
            self._earlier.add(step, is_settled=False)
            return self.is_sum
        combined = self.receive()
        if self.declared.is_queued:
            self._earlier.add(step, is_settled=True)
        if guard is not None:
            guard.check()
        return self.is_sum if combined is None else combined.mode is Mode.SUM

    def settle(self) -> None:
        """Check the reports of the step before, unless this rank has waited for them."""
        step = self._earlier.pop_unsettled()
        if step is None or self.reports is None or self.reports.are_lost():
            return
        try:
            self.reports.receive(step.verdict, step.rows, step.place)
            if self.reports.guard is not None:
                self.reports.guard.check()
        except (ConfigurationError, CollectiveMismatch) as error:
            where = f"found after backward {step.number} of {self.model_name}, whose gradients were used"
            raise error.supplement(where=error.where or where)  # noqa: B904 - the same one

    def end(self) -> None:
        """Forget the loss of a backward that has ended, or did not reach this model."""
        if (self.is_sum or self.is_empty) and not self.is_accumulated:
            self._accumulation.give_back_earlier()
        self.step = _Step()
        self.is_sum = self.is_empty = False

    def reading(self, number: int) -> TermReading:
        """Return how a term of the loss under way is read, in this step or in earlier ones."""
        combined = self.step.combined
        if combined is None or self.reports is None:
            return "mean"
        return self.reports.readings.of(combined, number, self.step.place)

    def counted(self, total: float) -> float:
        """Return the weight of the gradients among servers or worker groups: samples, if ``total`` counts none."""
        combined = self.step.combined
        mode = self.step.verdict.mode if combined is None else combined.mode
        if mode not in (Mode.SUM, Mode.TERMS):
            return total
        return (self.num_samples if combined is None else combined.num_samples) or total

    # -- numbers on a device -----------------------------------------------------------------------

    def _foresee(self) -> GlobalLoss | None:
        """Return the losses of all ranks without their reports, where all are as in the steps before.

        Called by: every rank of the group that computes with them, once per step, unless it receives the reports.
        """
        step, declared = self.step, self.declared
        if step.combined is None and declared.is_queued and self._earlier.are_like(step):
            step.combined = as_expected(step.verdict, self._sums_on_device())
        return step.combined

    def _has_numbers_on_device(self, combined: GlobalLoss) -> bool:
        is_queued = self.declared.is_queued
        if combined.mode is Mode.TERMS and (is_queued or any(math.isnan(term.amount) for term in combined.terms)):
            return True
        return self.declared.reports_at_start and (is_queued or math.isnan(combined.weight))

    def _sums_on_device(self) -> torch.Tensor:
        """Return [2 + MOST_TERMS]: of all ranks the weights, how many have samples, and the amounts of the terms."""
        mode, terms = self.step.verdict
        amounts = [term.amount for term in terms] if mode is Mode.TERMS else []
        numbers = (self._accumulation.carried + self.weight, float(not self.is_empty), *amounts)
        own = torch.zeros(2 + MOST_TERMS, dtype=torch.float64, device=self.declared.device)
        for place, amount in zip(own, numbers, strict=False):
            place.fill_(amount)
        return own if self.reports is None else self.reports.sum(own)

    def _checked(self, weight: Amount | None) -> Amount:
        if weight is None:
            raise ConfigurationError(
                "Cannot tell how many samples this loss averages over.",
                evidence="the replicated model itself was not called, or was called without a tensor argument",
                do="call loss.backward() within `with rankwise.weight(model, num_samples):`",
            )
        if self.declared.device is None:
            weight = float(weight)
        check_weight(weight, "backward", self._num_begun)
        return weight


def _refuse_calls(model_name: str, number: int | None = None) -> NoReturn:
    raise ConfigurationError(
        f"A loss of several forward passes of {model_name} has samples for one of them and none for another, by the "
        "function given as weight=.",
        where=None if number is None else f"found after backward {number} of the model",
        do="omit weight=, so that each mean in the loss counts by its own samples; or call backward() within "
        "`with rankwise.weight(model, amount):`",
    )
