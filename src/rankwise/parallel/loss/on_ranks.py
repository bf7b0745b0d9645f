# SPDX-License-Identifier: Apache-2.0
"""The loss of the backward under way, on all ranks: what this rank's gradients weigh, and whether the losses agree.

Used by gradient_sync, which has one per model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from rankwise.errors import ConfigurationError
from rankwise.exchange.protocol import LaneSize
from rankwise.parallel.loss.same_batch import batch_in_hand, check_same_batch
from rankwise.parallel.loss.verdict import REPORT_LENGTH, Mode, Verdict, combine, report_of
from rankwise.places import user_place, words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from rankwise.exchange.protocol import Exchange
    from rankwise.parallel.accumulation import Accumulation
    from rankwise.parallel.loss.verdict import GlobalLoss, GlobalTerm, Reading

_COUNTED_IN = {
    Mode.SAMPLES: "samples of the forward, or what rankwise.weight() was given",
    Mode.MEAN: "what the mean in the loss is over",
    Mode.SUM: "nothing, since the loss is a sum",
}
_SAMPLES = Verdict(Mode.SAMPLES)
_NOTHING = Verdict(Mode.NOTHING)


class LossOnRanks:
    """What the loss of one model is a mean over, step by step."""

    def __init__(
        self,
        number: int,
        parameters: Sequence[nn.Parameter],
        group: Exchange | None,
        model_name: str,
        accumulation: Accumulation,
    ) -> None:
        """Open a lane for what ranks report of their losses.

        Called by: every rank of ``group``, in the same order.

        Args:
            number: of the model, the same on every rank.
            parameters: of the model.
            group: the ranks that train the model; ``None`` for one alone.
            model_name: for errors.
            accumulation: of the model's gradients.
        """
        self.number = number
        self._ids = frozenset(map(id, parameters))
        self._accumulation = accumulation
        self.given_weight: float | None = None
        """What the user says around this backward that its loss is a mean over."""
        self.forward_weight: float | None = None
        """Samples of the latest forward, for a backward that does not pass through its output."""
        self.is_given_by_forward = False
        """Whether the user gave a function that says of a forward what the loss is a mean over."""
        self.weight = 0.0
        """What the backward under way counts."""
        self._verdict = _SAMPLES
        self._batch = 0
        """A number for the batch that the backward under way is for; 0 where that is not known."""
        self._num_ranks = 1 if group is None else group.world_size
        self._model_name = model_name
        self._combined: GlobalLoss | None = None
        self._readings: dict[tuple[int, int], Reading] = {}
        """How sums over numbers were read in earlier steps, by the loss and the number of the term."""
        self._is_reported = False
        self._group = group
        self._lane = None
        if group is not None:
            size = LaneSize(REPORT_LENGTH + self._num_ranks, 1, torch.float64, torch.device("cpu"))
            (self._lane,) = group.lanes([size], f"loss of {model_name}")

    def owns(self, variable: object) -> bool:
        """Return whether something is a parameter of the model."""
        return id(variable) in self._ids

    @property
    def is_given(self) -> bool:
        """Whether the user says what the loss is a mean over, so that it need not be read."""
        return self.given_weight is not None or self.is_given_by_forward

    @property
    def is_sum(self) -> bool:
        """Whether gradients are added up over ranks, not averaged."""
        return self._verdict.mode is Mode.SUM

    @property
    def is_needed(self) -> bool:
        """Whether it matters what the loss of the next backward is a mean over."""
        return self._group is not None or self.is_accumulated

    @property
    def is_accumulated(self) -> bool:
        """Whether the next backward is one of several that make one gradient."""
        return self._accumulation.is_continued or self._accumulation.is_open

    def expect(self, verdict: Verdict) -> None:
        """Take in what was read of the loss whose backward is about to run."""
        self._batch = batch_in_hand()
        self._verdict = _SAMPLES if self.is_given else _NOTHING if self.forward_weight == 0 else verdict
        if self.is_sum and not self.is_accumulated:
            # They are summed over ranks already.
            self._accumulation.put_earlier_gradients_aside()

    def exchange_terms(self) -> GlobalLoss | None:
        """Return what all ranks together have of each term; ``None`` where this rank has no samples.

        Called by: every rank of the group, before any node of the graph runs.
        """
        if self._verdict.mode is not Mode.TERMS:
            return None
        self.report()
        return self.receive()

    def is_sum_on_ranks(self) -> bool:
        """Return whether the ranks that have samples add their gradients up. Waits for their reports."""
        combined = self.receive()
        return self.is_sum if combined is None else combined.mode is Mode.SUM

    def begin(self, forward_weight: float | None) -> None:
        """Note what the backward under way counts.

        Args:
            forward_weight: samples of the forward that it passes through.

        Raises:
            ConfigurationError: nothing says how many samples there were.
        """
        if self._verdict.mode is Mode.SUM:
            self.weight = 1.0 / self._num_ranks
        elif self._verdict.mode is Mode.TERMS:
            self.weight = 1.0
        elif self._verdict.mode is Mode.MEAN:
            self.weight = self._verdict.weight
        else:
            self.weight = _checked(self.given_weight if self.given_weight is not None else forward_weight)

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
                "Two microsteps of an accumulation weigh their losses in different units.",
                evidence=f"the earlier ones count {earlier}; this one counts {counted_in}",
                do="compute the same loss in every microstep, and put all of them into rankwise.weight(), or none",
            )
        self._accumulation.counted_in = counted_in

    def report(self) -> None:
        """Send the other ranks what this one's loss is. Called by: every rank, once per step."""
        if self._lane is None or self._group is None or self._is_reported:
            return
        self._is_reported = True
        self._lane.claim()
        factor = self._lane.factor(1.0)
        report = [number * factor for number in report_of(self._verdict)]
        # numpy's are several times faster than torch's for a few numbers.
        body = self._lane.body.numpy()
        body.fill(0.0)
        body[: len(report)] = report
        body[REPORT_LENGTH + self._group.rank] = self._batch * factor
        self._lane.start(1.0, 1.0, [])

    def receive(self) -> GlobalLoss | None:
        """Wait for the reports of all ranks; ``None`` on one alone.

        Raises:
            CollectiveMismatch: they are at different batches.
            ConfigurationError: their losses are of different kinds.
        """
        if self._lane is not None and self._group is not None and self._is_reported and self._combined is None:
            self._lane.finish()
            sums = (self._lane.result.numpy() * self._num_ranks).tolist()
            are_all_ranks = self._num_ranks == self._group.watch.world_size
            check_same_batch(sums[REPORT_LENGTH:], self._model_name, are_all_ranks=are_all_ranks)
            self._combined = combine(sums)
            if not self._combined.is_alike:
                raise self._unlike()
            self._check_readings(self._combined)
        return self._combined

    def end(self) -> None:
        """Forget the loss of a backward that has ended, or did not come to this model."""
        if self.is_sum and not self.is_accumulated:
            self._accumulation.give_back_earlier()
        self._verdict = _SAMPLES
        self._batch = 0
        self._combined = None
        self._is_reported = False

    def _check_readings(self, combined: GlobalLoss) -> None:
        """Raise if a sum over a number was read otherwise in an earlier step, or cannot be read at all."""
        for number, term in enumerate(combined.terms):
            if term.reading in ("mean", "sum"):
                continue
            known = self._readings.get((combined.code, number))
            is_contradicted = known is not None and term.reading not in ("both", known)
            if is_contradicted or (known is None and term.reading == "both"):
                raise _ambiguous(term)
            if known is None:
                self._readings[combined.code, number] = term.reading

    def reading(self, number: int) -> Reading:
        """Return how a term of the loss under way is read, by this step or by the ones before."""
        combined = self._combined
        if combined is None:
            return "mean"
        own = combined.terms[number].reading
        return self._readings[combined.code, number] if own == "both" else own

    def _unlike(self) -> ConfigurationError:
        own = (
            ", ".join(f"{term.kind} ({term.operation})" for term in self._verdict.terms)
            or self._verdict.mode.name.lower()
        )
        return ConfigurationError(
            f"The loss of {self._model_name} is not of the same terms on all ranks.",
            evidence=f"on this rank: {own}",
            do="calculate every term on every rank, times zero where a rank has nothing of it; or say what the loss is "
            "a mean over with rankwise.weight(model, amount)",
        )


def _ambiguous(term: GlobalTerm) -> ConfigurationError:
    return ConfigurationError(
        f"A sum in the loss at {words(user_place())} is divided by {term.divisor:g}, which can be read in two ways.",
        evidence="if it is this rank's number of samples, the loss is a mean over all ranks' samples; if it is a "
        "constant, the loss is their sum over that constant",
        do="write a mean with .mean() or reduction='mean'; or pass what the loss is a mean over to "
        "rankwise.weight(model, amount)",
    )


def _checked(weight: float | None) -> float:
    if weight is None:
        raise ConfigurationError(
            "This backward does not say how many samples its loss is the mean of.",
            evidence="the replicated model was not called itself, or without a tensor argument",
            do="put loss.backward() into `with rankwise.weight(model, num_samples):`",
        )
    if not (math.isfinite(weight) and weight >= 0):
        raise ConfigurationError(
            f"The weight of a backward must be zero or more, not {weight}.",
            do="pass the number of samples or tokens the loss is the mean of",
        )
    return float(weight)
