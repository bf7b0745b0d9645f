# SPDX-License-Identifier: Apache-2.0
"""Tensors of a device that no backend supports: copied to the CPU, exchanged there, copied back.

The other ranks see tensors of the CPU only, so each rank decides for itself. CPU tensors are passed on as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Amount, BucketChannel, ChannelSize, Exchange

CPU = torch.device("cpu")


class ThroughHost:
    """An exchange for tensors of any device. See :class:`rankwise.comm.backends.protocol.Exchange`.

    ``inner`` sends the CPU tensors.
    """

    def __init__(self, inner: Exchange) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.detector = inner.detector
        self.agree, self.gather_notes, self.barrier = inner.agree, inner.gather_notes, inner.barrier
        self.close = inner.close

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, what: str) -> torch.Tensor:
        """Return the reduction over all ranks, on the tensor's own device."""
        return self.inner.all_reduce(tensor.to(CPU), op, what=what).to(tensor.device)

    def all_gather(self, tensor: torch.Tensor, *, what: str) -> torch.Tensor:
        """Return [world_size, *tensor.shape], on the tensor's own device."""
        return self.inner.all_gather(tensor.to(CPU), what=what).to(tensor.device)

    def broadcast(self, tensor: torch.Tensor, source: int, *, what: str) -> torch.Tensor:
        """Return the tensor of rank ``source``, on the device of this rank's."""
        return self.inner.broadcast(tensor.to(CPU), source, what=what).to(tensor.device)

    def all_to_all(self, tensor: torch.Tensor, sizes: Sequence[Sequence[int]], *, what: str) -> torch.Tensor:
        """Return what every rank sends to this one, on the tensor's own device."""
        return self.inner.all_to_all(tensor.to(CPU), sizes, what=what).to(tensor.device)

    def dup(self) -> ThroughHost:
        """Return another exchange of the same ranks."""
        return ThroughHost(self.inner.dup())

    def split(self, groups: Sequence[Sequence[int]]) -> ThroughHost:
        """Return an exchange of some of the ranks."""
        return ThroughHost(self.inner.split(groups))

    def channel_bytes(self, device: torch.device) -> int:
        """Return the best size of a CPU channel in bytes."""
        del device
        return self.inner.channel_bytes(CPU)

    def channels(self, sizes: Sequence[ChannelSize], what: str = "gradients") -> list[BucketChannel]:
        """Return a channel for each size, with its body on the device."""
        channels = self.inner.channels([replace(size, device=CPU) for size in sizes], what)
        return [
            channel if size.device == CPU else MirrorChannel(channel, size)
            for channel, size in zip(channels, sizes, strict=True)
        ]


class MirrorChannel:
    """A channel whose body has another dtype, or is on another device, than that of ``inner``, which sends it."""

    def __init__(self, inner: BucketChannel, size: ChannelSize) -> None:
        self._inner = inner
        self.body = self.result = torch.zeros(size.num_elements, dtype=size.dtype, device=size.device)
        self.can_claim = inner.can_claim
        self.claim = inner.claim
        self.factor = inner.factor
        self.total = inner.total
        self.is_flag_set = inner.is_flag_set

    @torch.no_grad()
    def start(self, share: Amount, weight: Amount, absent: Sequence[int]) -> None:
        """Copy the body and send it."""
        if isinstance(share, torch.Tensor) or share != 0.0:
            self._inner.body.copy_(self.body)
        self._inner.start(cast("float", share), cast("float", weight), absent)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the mean, and copy it back."""
        self._inner.finish()
        self.result.copy_(self._inner.result)
