# SPDX-License-Identifier: Apache-2.0
"""Channels for buckets of gradients through torch's process group: summed as they are, or half precision in float32.

They call the collectives of a group, and know nothing of how these are followed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.pending_collective import PendingCollective
    from rankwise.comm.backends.protocol import Amount, ChannelSize
    from rankwise.health.failure_detector import FailureDetector

HALF_PRECISION = (torch.bfloat16, torch.float16)
CPU_PIECE_ELEMENTS = 2**16
_WEIGHT_DTYPES = (torch.float32, torch.float64)


class _Group(Protocol):
    """What starts the collectives of a channel."""

    world_size: int
    detector: FailureDetector

    def start_all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, what: str) -> PendingCollective: ...
    def start_all_gather(self, out: torch.Tensor, tensor: torch.Tensor, *, what: str) -> PendingCollective: ...
    def start_all_to_all(self, out: torch.Tensor, tensor: torch.Tensor, *, what: str) -> PendingCollective: ...


class _Channel:
    """What the channels through torch's group have in common. A subclass sets ``body``."""

    body: torch.Tensor

    def __init__(self, group: _Group, what: str) -> None:
        self._group = group
        self._what = what
        self._pending: list[PendingCollective] = []
        self._set_flags: list[bool] | None = None
        """All flags: on a device the host waits for them, so it reads them at once."""

    def can_claim(self) -> bool:
        """Return whether nothing is pending, and nothing must be compared first."""
        return not self._pending and self._group.detector.check is None

    def _clear_unused(self, share: Amount) -> None:
        """Leave nothing of a body without samples, not even a NaN."""
        if isinstance(share, torch.Tensor):
            self.body.masked_fill_(share == 0, 0.0)
        elif share == 0.0:
            self.body.zero_()

    def _wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending.clear()


class TorchChannel(_Channel):
    """A channel for one bucket through torch's group. See :class:`rankwise.comm.backends.protocol.BucketChannel`.

    Flags and the weight follow the body; summed over ranks they show which flags are set, and divide the sum.
    """

    def __init__(self, group: _Group, size: ChannelSize, what: str) -> None:
        super().__init__(group, what)
        self._flat = torch.zeros(size.num_elements + size.num_flags + 1, dtype=size.dtype, device=size.device)
        self.body = self.result = self._flat[: size.num_elements]
        self._flags = self._flat[size.num_elements : -1]
        # If the dtype cannot hold a sum of weights precisely enough, that is sent separately.
        self._beside = None if size.dtype in _WEIGHT_DTYPES else self._flat.new_zeros(1, dtype=torch.float64)
        self._weight = self._flat[-1:] if self._beside is None else self._beside

    def claim(self) -> None:
        """Wait for a collective that an error interrupted."""
        self._wait()

    def factor(self, share: Amount) -> Amount:
        """Divide by the number of ranks when copying in: with equal weights the sum is already the mean."""
        return share / self._group.world_size

    @torch.no_grad()
    def start(self, share: Amount, weight: Amount, absent: Sequence[int]) -> None:
        """Start reducing."""
        self._clear_unused(share)
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
            self._set_flags = (self._flags > 0).tolist()
        return self._set_flags[flag]


class HalfChannel(_Channel):
    """A channel for one bucket in half precision. See :class:`rankwise.comm.backends.protocol.BucketChannel`.

    An all_reduce in half precision rounds at every hop. Here each rank receives its slice of every rank's gradients,
    sums it in float32, rounds once, and sends the result to all: as many bytes as a ring all_reduce. Each rank's share
    and weight travel with its flags. Legend: N ranks.

    Args:
        group: of the ranks.
        size: of the channel.
        what: is sent.
        unsummed: the channels of the group whose slices have been sent and not yet summed, in order.
    """

    def __init__(self, group: _Group, size: ChannelSize, what: str, unsummed: list[HalfChannel]) -> None:
        super().__init__(group, what)
        slice_elements = max(-(-size.num_elements // group.world_size), 1)
        self._rows = torch.zeros(group.world_size, slice_elements, dtype=size.dtype, device=size.device)
        self.body = self.result = self._rows.view(-1)[: size.num_elements]
        self._note = torch.zeros(2 + size.num_flags, dtype=torch.float64, device=size.device)
        self._notes = self._note.new_zeros(group.world_size, len(self._note))
        """[N, 2 + num_flags]: share, weight and flags of every rank."""
        self._received = self._rows[:0]
        self._unsummed = unsummed

    def can_claim(self) -> bool:
        """Return whether nothing is pending or unsummed, and nothing must be compared first."""
        return super().can_claim() and self not in self._unsummed

    def claim(self) -> None:
        """Wait for a collective that an error interrupted."""
        self.finish()

    def factor(self, share: Amount) -> Amount:
        """Return 1: a product in half precision would be rounded."""
        del share
        return 1.0

    @torch.no_grad()
    def start(self, share: Amount, weight: Amount, absent: Sequence[int]) -> None:
        """Send each rank its slice."""
        if self.body.device.type != "cpu" and self._group.detector.queue is not None:
            # Waiting orders the device's stream there, and does not stop this thread.
            self._sum_earlier()
        self._clear_unused(share)
        self._note.fill_(1.0)
        self._note[0].fill_(share)
        self._note[1].fill_(weight)
        self._set_flags = None
        for flag in absent:
            self._note[2 + flag].zero_()
        self._received = torch.empty_like(self._rows)
        self._unsummed.append(self)
        self._pending = [
            self._group.start_all_to_all(self._received, self._rows, what=self._what),
            self._group.start_all_gather(self._notes, self._note, what=self._what),
        ]

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the mean."""
        if self in self._unsummed:
            self._sum_earlier()
        self._wait()

    def total(self) -> Amount:
        """Return the sum of the weights."""
        total = self._notes[:, 1].sum()
        return total.item() if total.device.type == "cpu" else total

    def is_flag_set(self, flag: int) -> bool:
        """Return whether any rank has set a flag."""
        if self._set_flags is None:
            self._set_flags = self._notes[:, 2:].any(0).tolist()
        return self._set_flags[flag]

    def _sum_earlier(self) -> None:
        """Sum the slices of all channels that have sent theirs: in one order on every rank."""
        while self._unsummed:
            self._unsummed[0]._sum_slice()  # noqa: SLF001 - of this class
            del self._unsummed[0]

    def _sum_slice(self) -> None:
        """Divide the sum of this rank's slice, and send it to every rank."""
        self._wait()
        shares, weights = self._notes[:, :2].unbind(1)
        total = weights.sum()
        mean = torch.empty_like(self._rows[0])
        # A core's cache holds a piece; a device computes all of it at once, and need not copy each part in float32:
        # shares of one dim have torch compute in their precision.
        is_on_cpu = mean.device.type == "cpu"
        length, dtype = (CPU_PIECE_ELEMENTS, torch.float32) if is_on_cpu else (len(mean), mean.dtype)
        shares, divisor = shares.float().split(1), torch.where(total > 0, total, torch.inf)
        for out, first, *others in zip(*(one.split(length) for one in (mean, *self._received)), strict=True):
            wide = first.to(dtype) * shares[0]
            for part, share in zip(others, shares[1:], strict=True):
                wide.addcmul_(part.to(dtype), share)
            # Divided, not multiplied by a reciprocal, which would be rounded before.
            torch.div(wide, divisor, out=out)
        self._received = self._rows[:0]
        self._pending = [self._group.start_all_gather(self._rows, mean, what=self._what)]
