# SPDX-License-Identifier: Apache-2.0
"""Gradients of a step, put right when the losses of all its micro-batches are known; those of earlier steps stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.parallel.core.accumulation import Earlier, add_back, restore, set_aside
from rankwise.parallel.core.gradient_buckets import GradientBuckets, Weights
from rankwise.torch_private import foreach
from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.parallel.pipeline.step_weight import StepWeight


class StepGradients:
    """The gradients of this rank's stages: :meth:`begin`, compute them, :meth:`finish`."""

    def __init__(self, parameters: Sequence[nn.Parameter], copies: Exchange | None, what: str) -> None:
        """Open channels to the copies of the pipeline.

        Called by: every rank, in one order.

        Args:
            parameters: of this rank's stages.
            copies: the ranks with the same stages; ``None`` where there are none.
            what: the gradients are of, in words.
        """
        self._parameters = parameters
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._buckets: GradientBuckets | None = None
        if copies is not None and self._trained:
            self._buckets = GradientBuckets(self._trained, range(len(self._trained)), copies, what)
        self._earlier: Earlier = []

    def begin(self, *, has_factor: bool) -> None:
        """Keep what earlier steps have left from being scaled or averaged again.

        Args:
            has_factor: whether the step may have a factor other than one.
        """
        if self._buckets is not None:
            self._buckets.start_over()
            self._earlier = set_aside(self._trained)
        elif has_factor:
            # Backward keeps adding to the gradients themselves: without a factor the sum is the same to the bit.
            self._earlier = [(p, own_part(p.grad).detach().clone()) for p in self._parameters if p.grad is not None]

    def give_up(self) -> None:
        """Put back what earlier steps have left, after a step that broke off."""
        if self._buckets is not None:
            restore(self._trained, self._earlier)
        self._earlier = []

    @torch.no_grad()
    def finish(self, step: StepWeight) -> float:
        """Make the gradients of the step what one device computes of all copies' batches.

        Called by: every rank of the pipeline and of its copies.

        Returns:
            What they are the mean over.
        """
        total = step.divisor
        if self._buckets is not None:
            self._buckets.send_rest(Weights(step.share, step.divisor))
            self._buckets.take_back()
            total = self._buckets.total()
            add_back(self._earlier)
        elif step.factor != 1.0:
            self._scale(step.factor)
        self._earlier = []
        return total if step.total is None else step.total

    def _scale(self, factor: float) -> None:
        parts = [own_part(p.grad) for p in self._parameters if p.grad is not None]
        earlier = [one for _, one in self._earlier]
        added_to = [own_part(p.grad) for p, _ in self._earlier if p.grad is not None]
        if earlier:
            foreach.sub_(added_to, earlier)
        if parts:
            foreach.mul_(parts, factor)
        if earlier:
            foreach.add_(added_to, earlier)
