# SPDX-License-Identifier: Apache-2.0
"""The loss of a step on all ranks of a pipeline and of its copies: the weight of the gradients, and the value returned.

The last stages of the copies exchange their readings, and each sends the result to the other stages of its copy.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from rankwise.errors import ConfigurationError
from rankwise.health.call_site import user_call_site, words
from rankwise.log import warn
from rankwise.pipeline.micro_batch_losses import NO_STEP, NOTHING, CopyLosses, StepWeight, settled
from rankwise.replicate.loss.graph import plain
from rankwise.replicate.loss.hooks import warn_once
from rankwise.replicate.loss.reports import Mode, TermReadings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.health.call_site import CallSite
    from rankwise.pipeline.micro_batch_losses import MicroBatchLosses, StepLosses
    from rankwise.replicate.loss.batch_statistics import Statistic
    from rankwise.replicate.loss.reports import GlobalTerm

_OF_PIPELINE = "loss of the pipeline"
LOSS_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_INSTEAD = (
    "micro-batches are averaged by samples, which differs from the result of one device; return one mean "
    "or one sum, or pass weight= to pipeline(): a function of a micro-batch's target that returns the "
    "number its loss averages over"
)


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
        self._readings = TermReadings(_ambiguous)
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
            raise _unlike(losses)
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
            warn_once(scaled.operation, _of_a_scaled_mean(scaled.num_rows), all_ranks=True)
        if together.combined.elements is not None:
            warn_once("padding", _OF_PADDING, all_ranks=True)
        if together.by_samples and losses.terms and not self._has_warned:
            self._has_warned = True
            warn(f"the loss of the pipeline ({words(line)}) {_finding(losses)}: {_INSTEAD}", all_ranks=True)


def _finding(losses: MicroBatchLosses) -> str:
    unknown = next((term for term in losses.terms if term.kind == "unknown"), None)
    if unknown is not None:
        return f"is neither a mean nor a sum over samples because of {unknown.operation}"
    return "adds terms that are means over different numbers, or means and sums"


def _unlike(losses: MicroBatchLosses) -> ConfigurationError:
    return ConfigurationError(
        "The loss of the pipeline does not have the same terms for all micro-batches.",
        evidence="of the last one on this rank: "
        + (", ".join(f"{one.kind} ({one.operation})" for one in losses.terms) or "none"),
        do="compute every term for every micro-batch, multiplied by zero where it has no samples for it; or "
        "pass weight= to rankwise.pipeline()",
    )


def _ambiguous(term: GlobalTerm, place: CallSite | None) -> ConfigurationError:
    by = f"divided by {term.divisor:g}" if term.divisor else "multiplied by a number"
    return ConfigurationError(
        f"A sum in the loss of the pipeline at {words(place)} is {by}, which is ambiguous.",
        evidence="if it is a micro-batch's number of samples, the loss is a mean over all samples; if it is a "
        "constant, the loss is a sum times that constant",
        do="write a mean with .mean() or reduction='mean', or a sum without the number; or pass weight= to "
        "rankwise.pipeline()",
    )


def _of_a_scaled_mean(num_rows: int) -> str:
    return (
        f"a mean in the loss of the pipeline ({{where}}) is multiplied by {num_rows}, which is also a "
        "micro-batch's number of samples but is treated as a constant: if it is that number, write the sum "
        "with reduction='sum' or .sum()"
    )


_OF_PADDING = (
    "the mean in the loss of the pipeline ({where}) averages over different numbers of elements per "
    "sample in different copies of the pipeline, as when each pads to its own longest sample: one device "
    "would pad all samples to one length, and its mean would differ; exclude padding ((loss * "
    "mask).sum() / mask.sum(), ignore_index), pad to a fixed length, or pass weight= to pipeline()"
)
