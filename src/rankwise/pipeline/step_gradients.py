# SPDX-License-Identifier: Apache-2.0
"""Gradients of a step, scaled when the losses of all its micro-batches are known, and then seen by the script's hooks.

Gradients of earlier steps stay as they are. Used by step_api.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.replicate.bucket import Weights
from rankwise.replicate.gradient_buckets import GradientBuckets
from rankwise.replicate.gradient_hooks import GradientHooks
from rankwise.replicate.loss.graph import multiply_
from rankwise.replicate.no_sync_and_weight import Earlier, add_back, restore, set_aside
from rankwise.torch_private import foreach
from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from torch import nn

    from rankwise.comm.backends.protocol import Amount, Exchange
    from rankwise.pipeline.micro_batch_losses import StepWeight


class StepGradients:
    """The gradients of this rank's stages: :meth:`begin`, compute them, :meth:`finish`."""

    def __init__(
        self, named: Mapping[str, nn.Parameter], copies: Exchange | None, what: str, sparse: Container[int]
    ) -> None:
        """Open channels to ``copies``, the ranks with the same stages.

        Called by: every rank, in one order.

        Args:
            named: the parameters of this rank's stages, by name.
            copies: ``None`` if there are none.
            what: the name of the gradients, for errors.
            sparse: identities of the parameters whose gradients are sparse.
        """
        self._parameters = parameters = list(named.values())
        self._hooks = GradientHooks(list(named), parameters, is_in_stages=True)
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._buckets: GradientBuckets | None = None
        if copies is not None and self._trained:
            in_rows = {number for number, one in enumerate(self._trained) if id(one) in sparse}
            self._buckets = GradientBuckets(self._trained, range(len(self._trained)), copies, what, sparse=in_rows)
        self._earlier: Earlier = []

    def begin(self, *, has_factor: bool) -> None:
        """Keep gradients of earlier steps from being scaled or averaged again."""
        self._hooks.begin(is_deferred=True)
        if self._buckets is not None:
            self._buckets.start_over()
            self._earlier = set_aside(self._trained)
        elif has_factor:
            # Backward keeps adding to the gradients themselves: without a factor the sum is bitwise the same.
            self._earlier = [(p, own_part(p.grad).detach().clone()) for p in self._parameters if p.grad is not None]

    def give_up(self) -> None:
        """Put back the gradients of earlier steps, after a step that failed."""
        if self._buckets is not None:
            restore(self._trained, self._earlier)
        self._earlier = []
        self._hooks.end()

    @torch.no_grad()
    def finish(self, step: StepWeight) -> Amount:
        """Make the gradients what one device computes of all copies' batches; return what they are the mean over.

        Called by: every rank of the pipeline and of its copies.
        """
        total = step.divisor
        if self._buckets is not None:
            self._buckets.send_rest(Weights(step.share, step.divisor))
            total = self._buckets.take_back()
            add_back(self._earlier)
        elif isinstance(step.factor, torch.Tensor) or step.factor != 1.0:
            self._scale(step.factor)
        self._earlier = []
        self._hooks.change({})
        self._hooks.follow()
        self._hooks.end()
        return total if step.total is None else step.total

    def _scale(self, factor: Amount) -> None:
        parts = [own_part(p.grad) for p in self._parameters if p.grad is not None]
        earlier = [one for _, one in self._earlier]
        added_to = [own_part(p.grad) for p, _ in self._earlier if p.grad is not None]
        if earlier:
            foreach.sub_(added_to, earlier)
        if isinstance(factor, torch.Tensor):
            for part in parts:
                multiply_(part, factor)
        elif parts:
            foreach.mul_(parts, factor)
        if earlier:
            foreach.add_(added_to, earlier)
