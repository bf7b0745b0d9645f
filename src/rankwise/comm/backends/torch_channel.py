# SPDX-License-Identifier: Apache-2.0
"""Channels for buckets of gradients through torch's process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Amount, ChannelSize
    from rankwise.health.failure_detector import FailureDetector

_WEIGHT_DTYPES = (torch.float32, torch.float64)


class Pending(Protocol):
    """A collective that has been started."""

    def wait(self) -> None:
        """Return when the result can be used."""
        ...


class ReducingGroup(Protocol):
    """The part of a group of ranks that a channel sends through."""

    world_size: int
    detector: FailureDetector

    def start_all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, what: str) -> Pending:
        """Start reducing ``tensor`` in place."""
        ...


class TorchChannel:
    """A channel for one bucket through torch's group. See :class:`rankwise.comm.backends.protocol.BucketChannel`.

    Flags and the weight follow the body; summed over ranks they show which flags are set, and divide the sum.
    """

    def __init__(self, group: ReducingGroup, size: ChannelSize, what: str) -> None:
        self._group = group
        self._what = what
        self._flat = torch.zeros(size.num_elements + size.num_flags + 1, dtype=size.dtype, device=size.device)
        self.body = self.result = self._flat[: size.num_elements]
        self._flags = self._flat[size.num_elements : -1]
        # If the dtype cannot hold a sum of weights precisely enough, that is sent separately.
        self._beside = None if size.dtype in _WEIGHT_DTYPES else self._flat.new_zeros(1, dtype=torch.float64)
        self._weight = self._flat[-1:] if self._beside is None else self._beside
        self._pending: list[Pending] = []
        self._set_flags: list[bool] | None = None

    def can_claim(self) -> bool:
        """Return whether nothing is pending, and nothing must be compared first."""
        return not self._pending and self._group.detector.check is None

    def claim(self) -> None:
        """Wait for a collective that an error interrupted."""
        self._wait()

    def factor(self, share: Amount) -> Amount:
        """Divide by the number of ranks when copying in: with equal weights the sum is already the mean."""
        return share / self._group.world_size

    @torch.no_grad()
    def start(self, share: Amount, weight: Amount, absent: Sequence[int]) -> None:
        """Start reducing."""
        if isinstance(share, torch.Tensor):
            self.body.masked_fill_(share == 0, 0.0)
        elif share == 0.0:
            self.body.zero_()
        self._weight.fill_(weight)
        self._flags.fill_(1.0)
        self._set_flags = None
        for flag in absent:
            self._flags[flag].zero_()
        self._pending = [
            self._group.start_all_reduce(tensor, what=self._what)
            for tensor in (self._flat, self._beside)
            if tensor is not None
        ]

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the sum, and divide it."""
        self._wait()
        if self.body.device.type == "cpu":
            total = self._weight.item()
            scale = self._group.world_size / total if total > 0 else 0.0
            if scale != 1.0:
                self.body.mul_(scale)
        else:
            # Divided on the device: reading the weight would wait for the device, once per bucket.
            self.body.mul_(torch.where(self._weight > 0, self._group.world_size / self._weight, 0.0)[0])

    def total(self) -> Amount:
        """Return the sum of the weights."""
        return self._weight.item() if self._weight.device.type == "cpu" else self._weight[0]

    def is_flag_set(self, flag: int) -> bool:
        """Return whether any rank has set a flag."""
        if self._flags.device.type == "cpu":
            return bool(self._flags[flag].item())
        if self._set_flags is None:
            # The host waits for the device, so it reads all of them at once.
            self._set_flags = (self._flags > 0).tolist()
        return self._set_flags[flag]

    def _wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
