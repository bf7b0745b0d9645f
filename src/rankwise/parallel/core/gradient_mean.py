# SPDX-License-Identifier: Apache-2.0
"""Gradients of one step, averaged over ranks in one go when the step has computed them all; and their norm.

For strategies that run backward themselves, where there is nothing to reduce meanwhile. Used by pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rankwise.parallel.core.buckets import Bucket, channel_size, plan
from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import Exchange


class GradientMean:
    """Makes the gradients of some parameters weighted means over the ranks of an exchange.

    A step is: :meth:`begin`, compute gradients, :meth:`average`. What ``.grad`` held before is not averaged again:
    after several steps without ``zero_grad`` it is the sum of the steps' means, on every rank the same.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], exchange: Exchange, what: str) -> None:
        """Open a channel per bucket.

        Called by: every rank of ``exchange``, with the same parameters.

        Args:
            parameters: which to average; those without a gradient on any rank keep none.
            exchange: the ranks to average over.
            what: the gradients are of, in words.
        """
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._earlier: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._buckets: list[Bucket] = []
        if self._parameters:
            limit_bytes = exchange.channel_bytes(self._parameters[0].device)
            members = plan(self._parameters, range(len(self._parameters)), limit_bytes, limit_bytes)
            channels = exchange.channels([channel_size(numbers, self._parameters) for numbers in members], what)
            self._buckets = [
                Bucket(numbers, self._parameters, channel) for numbers, channel in zip(members, channels, strict=True)
            ]

    def begin(self) -> None:
        """Set aside the gradients of earlier steps."""
        # Their memory may be the channels', which the next mean overwrites.
        self._earlier = [(p, p.grad.detach().clone()) for p in self._parameters if p.grad is not None]
        for parameter, _ in self._earlier:
            parameter.grad = None

    def give_up(self) -> None:
        """Put back what :meth:`begin` set aside, in place of what a broken step has left."""
        for parameter in self._parameters:
            parameter.grad = None
        for parameter, earlier in self._earlier:
            parameter.grad = earlier
        self._earlier.clear()

    def average(self, share: float, weight: float) -> float:
        """Replace each gradient by sum_r share_r g_r / sum_r weight_r, and add what was set aside.

        Called by: every rank of the exchange, once per step.

        Args:
            share: what this rank's gradients count; with 0 it need not have any.
            weight: this rank's part of what the sum is divided by.

        Returns:
            The sum of the weights; this rank's own where there is nothing to average.
        """
        for bucket in self._buckets:
            bucket.send(share, weight)
        for bucket in self._buckets:
            bucket.take_back()
        with torch.no_grad():
            for parameter, earlier in self._earlier:
                if parameter.grad is None:
                    parameter.grad = earlier
                else:
                    own_part(parameter.grad).add_(own_part(earlier))
        self._earlier.clear()
        return self._buckets[0].channel.total() if self._buckets else weight


def clip_to_norm(
    parameters: Sequence[nn.Parameter], max_norm: float, exchange: Exchange | None, device: torch.device
) -> torch.Tensor:
    """Scale gradients down to a 2-norm of at most ``max_norm`` over all ranks, and return what it was.

    Called by: every rank of ``exchange``, each with parameters that no other has.

    Args:
        parameters: of this rank.
        max_norm: of all gradients together.
        exchange: the ranks; ``None`` for this one alone.
        device: of the parameters.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    own: Any = get_total_norm([cast("torch.Tensor", parameter.grad) for parameter in trained])
    if own_part(own) is not own:
        own = own.full_tensor()
    square = own.to(device, torch.float64).square()
    if exchange is not None:
        square = exchange.all_reduce(square, what="norm of the gradients")
    norm = square.sqrt().to(own.dtype)
    clip_grads_with_norm_(trained, max_norm, norm)
    return norm
