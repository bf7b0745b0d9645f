# SPDX-License-Identifier: Apache-2.0
"""The gradients that one callback reduces over ranks, in buckets that travel while backward goes on.

Imported by the GradManager. Nothing here weighs ranks: each counts as one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from rankwise.errors import ConfigurationError
from rankwise.parallel.core.buckets import MEBIBYTE_BYTES, Bucket, BucketQueue, channel_size, plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import Exchange


class ReducedGradients:
    """The way of some gradients over the ranks of an exchange, used again in every backward."""

    def __init__(self, tensors: Sequence[torch.Tensor], exchange: Exchange, method: str) -> None:
        """Open a channel per bucket.

        Called by: every rank of ``exchange``, with tensors of the same shapes in the same order.

        Args:
            tensors: whose gradients are reduced.
            exchange: the ranks.
            method: ``"sum"`` or ``"mean"``.
        """
        self.tensors = list(tensors)
        self._exchange = exchange
        # What a mean divides by is what a sum is multiplied with: the bits are those of the plain sum.
        self._share = float(exchange.world_size) if method == "sum" else 1.0
        parameters = cast("list[nn.Parameter]", self.tensors)
        limit_bytes = exchange.channel_bytes(self.tensors[0].device)
        # The last layer's gradients come first.
        members = plan(parameters, range(len(parameters) - 1, -1, -1), MEBIBYTE_BYTES, limit_bytes)
        # Of its own, so that it needs no order towards the collectives that backward runs.
        channels = exchange.dup().channels(
            [channel_size(numbers, parameters) for numbers in members], "gradients of a GradManager"
        )
        buckets = [Bucket(numbers, parameters, channel) for numbers, channel in zip(members, channels, strict=True)]
        self._buckets = BucketQueue(buckets)
        self._bucket_of = {id(tensor): bucket for bucket in buckets for tensor in bucket.parameters}
        self._is_new = True

    def is_of(self, tensors: Sequence[torch.Tensor], exchange: Exchange) -> bool:
        """Return whether it is the way of just these, over these ranks."""
        return self._exchange is exchange and list(map(id, self.tensors)) == list(map(id, tensors))

    def arrived(self, tensor: torch.Tensor) -> None:
        """Note that the gradient of a tensor is there, and send what is full."""
        if self._is_new and tensor.grad is not None and tensor.grad.layout is not torch.strided:
            raise ConfigurationError(
                "A gradient is sparse and cannot be reduced over ranks.", do="create the layer with sparse=False"
            )
        missing = self._bucket_of[id(tensor)].note_arrival()
        if missing > 0:
            return
        if missing < 0:
            raise ConfigurationError(
                "A parameter received another gradient after its gradient was sent to the other ranks.",
                evidence="a part of the model runs backward several times within one backward()",
                do="use torch.utils.checkpoint with use_reentrant=False",
            )
        for bucket in self._buckets.full():
            self._send(bucket)

    def send_rest(self) -> None:
        """Send the buckets whose gradients did not all come."""
        for bucket in self._buckets.rest():
            self._send(bucket)

    def finish(self) -> None:
        """Wait for the results, which become the gradients."""
        self._buckets.take_back()
        self._buckets.start_over()
        self._is_new = False
        recorder = self._exchange.detector.recorder
        recorder.note_step(recorder.step + 1)

    def abandon(self) -> None:
        """Begin anew after an error broke a backward."""
        self._buckets.start_over()

    def _send(self, bucket: Bucket) -> None:
        bucket.send(self._share, 1.0)
