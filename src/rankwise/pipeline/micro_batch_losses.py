# SPDX-License-Identifier: Apache-2.0
"""Reads the loss of each micro-batch as soon as it is computed, and returns its scale. Does no communication.

The share of a micro-batch in the whole is known only after the last one, when gradients of the first have already gone
to other stages. So each is scaled by the number it is a mean over relative to the first one's, and step_weight computes
the remaining factor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from rankwise.comm.session import current
from rankwise.pipeline.step_weight import NOTHING, CopyLosses, times
from rankwise.replicate.loss.amounts import ratio
from rankwise.replicate.loss.loss_on_ranks import model_numbers
from rankwise.replicate.loss.reports import (
    MOST_TERMS,
    REPORT_LENGTH,
    Mode,
    RowLengthsInSteps,
    Verdict,
    report_of,
    verdict_of,
)
from rankwise.replicate.loss.terms import ForwardCall, LossReader, mark_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import Amount
    from rankwise.pipeline.executor import MicroBatch
    from rankwise.replicate.loss.reports import RowLengths
    from rankwise.replicate.loss.terms import Term


class MicroBatchLosses:
    """The losses of one copy's micro-batches, step by step."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take the parameters of this rank's stages. Called by: every rank, in the order of other strategies' calls."""
        self.number = next(model_numbers)
        """Of the model, as :class:`rankwise.replicate.loss.terms.LossModel` has one."""
        self.terms: tuple[Term, ...] = ()
        """Of the latest loss."""
        self.rows: RowLengths | None = None
        """Of the latest loss, where padding may count in it."""
        self._ids = set(map(id, parameters))
        self._is_unlike = False
        """Whether terms of a loss have been means over different numbers: micro-batches are then averaged by samples,
        in all later steps too."""
        self._copy = NOTHING
        self._first: tuple[float, ...] | None = None
        self._first_on_device: torch.Tensor | None = None
        self._num_samples = 0
        self._are_samples_first = False
        """Whether a loader gave the batch, so that its first dim is known to be the sample."""
        self._num_odd = 0
        self._rows_in_steps = RowLengthsInSteps()

    def owns(self, variable: object) -> bool:
        """Return whether something is a parameter of this rank's stages."""
        return id(variable) in self._ids

    def begin(self, num_samples: int) -> None:
        """Begin a step with a batch of so many samples."""
        self._copy, self._first, self._num_odd = NOTHING, None, 0
        self._first_on_device = None
        self._num_samples = num_samples
        batch = current().batches.latest
        self._are_samples_first = batch is not None and batch.num == num_samples

    @property
    def of_copy(self) -> CopyLosses:
        """The losses since :meth:`begin` together."""
        return self._copy

    def scaled_mean(self) -> Term | None:
        """Return a mean that is multiplied by each micro-batch's number of samples, if there is one."""
        is_always = 0 < self._num_odd == self._copy.reports[2]
        return next((term for term in self.terms if _is_scaled_mean(term)), None) if is_always else None

    def scale(self, loss: torch.Tensor, output: object, part: MicroBatch) -> Amount:
        """Return the factor of the loss of a micro-batch, zero if nothing in it counts.

        Called by: ranks with the last stage, before backward.
        """
        terms = self._terms(loss, output, part)
        verdict = verdict_of(terms)
        if len(verdict.terms) > 1:
            # Whether one number scales all terms decides what is computed next.
            verdict = verdict.read()
        self.terms = verdict.terms
        self._num_odd += any(map(_is_scaled_mean, terms))
        has_penalty = any(term.kind == "same" for term in terms)
        amounts = _amounts(verdict, has_penalty=has_penalty)
        if _is_plain_sum(verdict) and not has_penalty:
            scale: Amount = 1.0
            counted: Amount = float(self._num_samples)
        else:
            multiple = self._multiple(amounts, part.num_samples)
            scale, counted = part.share * multiple, part.num_samples * multiple
        self._note(verdict, amounts, counted, part.num_samples, has_penalty=has_penalty)
        return scale

    def _terms(self, loss: torch.Tensor, output: object, part: MicroBatch) -> list[Term]:
        if loss.grad_fn is None:
            return []
        call = ForwardCall(self.number, float(part.num_samples), _first_sizes(part.leaves))
        mark_output(output, call)
        reader = LossReader((self,))
        reader.read(loss)
        self.rows = self._rows_in_steps.read(reader.terms, call, part.num_samples if self._are_samples_first else None)
        return reader.terms

    def _multiple(self, amounts: tuple[Amount, ...] | None, num_samples: int) -> Amount:
        if amounts and isinstance(amounts[0], torch.Tensor):
            per_sample_there = amounts[0] / num_samples
            first = per_sample_there if self._first_on_device is None else self._first_on_device
            self._first_on_device = first = torch.where(first == 0, per_sample_there, first)
            return ratio(per_sample_there, first)
        return self._known_multiple(cast("tuple[float, ...] | None", amounts), num_samples)

    def _known_multiple(self, amounts: tuple[float, ...] | None, num_samples: int) -> float:
        if amounts is None or (self._is_unlike and len(amounts) > 1):
            return 1.0
        if not any(amounts):
            return 0.0
        per_sample = tuple(one / num_samples for one in amounts)
        self._first = self._first or per_sample
        if len(per_sample) != len(self._first):
            # Losses of different terms are an error once all are known.
            return 1.0
        multiple = times(per_sample, self._first)
        if multiple is None:
            self._is_unlike = True
            return 1.0
        return multiple

    def _note(
        self,
        verdict: Verdict,
        amounts: tuple[Amount, ...] | None,
        counted: Amount,
        num_samples: int,
        *,
        has_penalty: bool,
    ) -> None:
        before = self._copy
        own = amounts or (float(num_samples),)
        report = report_of(verdict, own[0], float(num_samples), self.rows)
        is_unlike = amounts is None or (self._is_unlike and len(amounts) > 1)
        self._copy = CopyLosses(
            before.counted + counted,
            before.num_unlike + is_unlike,
            before.num_penalties + has_penalty,
            _sum(before.amounts, own, MOST_TERMS),
            _sum(before.reports, report, REPORT_LENGTH),
        )


def _amounts(verdict: Verdict, *, has_penalty: bool) -> tuple[Amount, ...] | None:
    """Return the number each term of a loss is a mean over; ``None`` if one factor cannot scale all of them."""
    if verdict.mode is Mode.MEAN:
        return (verdict.terms[0].amount,)
    undivided = [term for term in verdict.terms if term.kind == "sum" and not term.divisor]
    has_mean = any(term.kind == "mean" for term in verdict.terms)
    if verdict.mode is Mode.SAMPLES or (undivided and (has_mean or has_penalty)):
        return None
    return tuple(term.amount for term in verdict.terms)


def _is_plain_sum(verdict: Verdict) -> bool:
    is_read = verdict.mode in (Mode.SUM, Mode.TERMS)
    return is_read and all(term.kind == "sum" and not term.divisor for term in verdict.terms)


def _is_scaled_mean(term: Term) -> bool:
    return term.is_odd and term.kind == "mean"


def _first_sizes(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Return the sizes of the first tensor that the model is called with."""
    return next((tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), ())


def _sum(some: Sequence[Any], others: Sequence[Any], length: int) -> tuple[Any, ...]:
    padded = [*others, *(0.0 for _ in range(length - len(others)))]
    return tuple(one + other for one, other in zip(some, padded, strict=True))
