# SPDX-License-Identifier: Apache-2.0
"""Send tensors through torch's process group (Gloo on CPU, NCCL on GPUs), and gradients through channels of it.

Every collective is followed, by the thread that waits for it or by one that follows the device, so that it ends with
the rank's name when a peer fails or does not arrive. Takes and returns plain contiguous tensors; ``collectives``
handles types and trees.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rankwise.comm.backends.protocol import (
    NOTE_BYTES,
    WHAT_EACH_CALLED,
    bytes_of_rows,
    calls_differ,
    describe_channels,
    row_of,
)
from rankwise.health.collective_timeout import SLICE_SECONDS, CollectiveWait
from rankwise.health.diagnosis import is_of_a_signal_handler
from rankwise.health.queued_collectives import order_stream
from rankwise.tensors.arrays import bytes_of
from rankwise.torch_private.groups import next_number, open_among

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.comm.backends.protocol import Amount, BucketChannel, ChannelSize
    from rankwise.health.failure_detector import FailureDetector
    from rankwise.health.flight_recorder import Ticket

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
_is_renamed = hasattr(dist, "all_gather_single")
ALL_GATHER: Any = getattr(dist, "all_gather_single" if _is_renamed else "all_gather_into_tensor")
"""Renamed in torch 2.13."""
CPU_CHANNEL_BYTES = 8 * 2**20
OTHER_CHANNEL_BYTES = 25 * 2**20
DIGEST_BYTES = 8


HALF_PRECISION = (torch.bfloat16, torch.float16)
CPU_PIECE_ELEMENTS = 2**16
_WEIGHT_DTYPES = (torch.float32, torch.float64)


def handle_of(work: dist.Work | None) -> dist.Work:
    """Return torch's handle of a collective that has started."""
    if work is None:
        message = "torch's process group did not return a handle"
        raise RuntimeError(message)
    return work


@dataclass(slots=True, eq=False)
class PendingCollective:
    """A pending collective of CPU tensors."""

    _detector: FailureDetector
    _ticket: Ticket
    _work: dist.Work

    def wait(self) -> None:
        """Return when the result is ready; raise the failure detector's error if it will not be."""
        with CollectiveWait(self._detector, self._ticket) as wait:
            while not self._is_done(SLICE_SECONDS):
                wait.check()

    def _is_done(self, seconds: float) -> bool:
        try:
            self._work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            if is_of_a_signal_handler(error):
                raise
            if not self._work.is_completed():
                return False
            # It failed, or has completed since the time was up: this tells which, without waiting.
            self._work.wait()
        return True


class QueuedCollective(PendingCollective):
    """A collective that has been queued on the device."""

    __slots__ = ()

    def wait(self) -> None:
        """Have what this thread queues next on the device wait for the result. The CPU does not wait."""
        if self._detector.error is not None:
            raise self._detector.error
        order_stream(self._detector, self._ticket, self._work)


def follow(
    detector: FailureDetector, ticket: Ticket, tensor: torch.Tensor, start: Callable[[], dist.Work | None]
) -> PendingCollective:
    """Start a collective of ``tensor``, and return it, to be waited for.

    Args:
        detector: of this rank.
        ticket: of the collective.
        tensor: what this rank sends.
        start: starts it, and returns torch's handle.

    Raises:
        PeerFailed, PeerMissing: the communicator was aborted.
    """
    if detector.queue is None or tensor.device.type == "cpu":
        return PendingCollective(detector, ticket, handle_of(start()))
    try:
        work = handle_of(start())
    except RuntimeError:
        if detector.error is None:
            raise
        raise detector.error from None
    detector.queue.add(ticket, work)
    return QueuedCollective(detector, ticket, work)


class TorchGroup:
    """torch's default process group, opened by ``join``, or another of the same ranks."""

    def __init__(
        self,
        detector: FailureDetector,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None = None,
        exchange_id: int = 0,
        *,
        world_ranks: Sequence[int] | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.world_ranks = list(range(world_size) if world_ranks is None else world_ranks)
        """The numbers of its ranks in the world."""
        self.detector = detector
        self._is_part = world_ranks is not None
        self._group = group
        self.exchange_id = exchange_id

    def dup(self) -> TorchGroup:
        """Return another group of the same ranks, whose collectives need no order relative to this one's.

        Called by: every rank, in the same order.
        """
        # Other parts of the world open theirs independently.
        group = self._open_locally(self.world_ranks) if self._is_part else dist.new_group(self.world_ranks)
        return self._of(group, self.world_ranks, self.detector.recorder.new_exchange_id(self.world_ranks))

    def _of(self, group: object, world_ranks: Sequence[int], exchange_id: int) -> TorchGroup:
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"torch.distributed.new_group() gave {group!r} for a group that this rank is in")
        rank = world_ranks.index(self.world_ranks[self.rank])
        is_part = self._is_part or len(world_ranks) < self.world_size
        return TorchGroup(
            self.detector, rank, len(world_ranks), group, exchange_id, world_ranks=world_ranks if is_part else None
        )

    def split(self, groups: Sequence[Sequence[int]]) -> TorchGroup:
        """Return an exchange of the one of ``groups`` that this rank is in."""
        own = next(ranks for ranks in groups if self.rank in ranks)
        world_ranks = [self.world_ranks[rank] for rank in own]
        group = self._open_locally(world_ranks)
        return self._of(group, world_ranks, self.detector.recorder.new_exchange_id(world_ranks))

    def _open_locally(self, world_ranks: list[int]) -> object:
        """Open a torch group that only its own ranks know.

        Called by: every rank of this exchange, each with the group that it is to be in.

        The name of such a group has a number in it. Ranks that have opened unequal numbers of groups would wait for one
        another under different names, so they agree on the largest first.
        """
        own = torch.tensor([next_number()])
        numbers = self._all_gather(own, self.detector.ticket("how many groups each rank is in", self.exchange_id))
        return open_among(world_ranks, self.world_ranks[self.rank], int(numbers.max()))

    def compare_everything(self) -> None:
        """Make the ranks compare each collective of all their exchanges on this group before it begins.

        Called by: every rank.
        """

        def compare(what: str) -> None:
            self._gather_notes(b"", self._uncompared(what))

        self.detector.check_by(compare)

    def agree(self, what: str) -> None:
        """Check that every rank makes the same call: otherwise Gloo mixes up tensors, or ends the process."""
        self.gather_notes(b"", what)

    def gather_notes(self, note: bytes, what: str) -> list[bytes]:
        """Return the notes of all ranks, once they have agreed on ``what``."""
        return self._gather_notes(note, self.detector.ticket(what, self.exchange_id))

    def _gather_notes(self, note: bytes, ticket: Ticket) -> list[bytes]:
        # All agreements have one size: Gloo would mistake another call's for this one's.
        digest = zlib.crc32(ticket.what.encode()).to_bytes(DIGEST_BYTES, "little")
        row = row_of(digest + note, DIGEST_BYTES + NOTE_BYTES)
        rows = bytes_of_rows(self._all_gather(row, ticket))
        if any(not one.startswith(digest) for one in rows):
            raise calls_differ(
                self._gather_calls, ticket.what, self.detector.hostname, self.world_ranks, self.detector.world_size
            )
        return [one[DIGEST_BYTES:] for one in rows]

    def _gather_calls(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._all_gather(tensor, self._uncompared(WHAT_EACH_CALLED))

    def _uncompared(self, what: str) -> Ticket:
        """Record a collective that is part of a comparison, and is itself not compared."""
        return self.detector.recorder.begin(what, self.exchange_id)

    def barrier(self, what: str) -> None:
        """Return when every rank has reached ``what``."""
        self.agree(what)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, what: str) -> torch.Tensor:
        """Return the reduction over all ranks; contiguous, same shape and dtype on each."""
        result = tensor.clone(memory_format=torch.contiguous_format)
        self.start_all_reduce(result, op, what=what).wait()
        return result

    def all_gather(self, tensor: torch.Tensor, *, what: str) -> torch.Tensor:
        """Return [world_size, *tensor.shape], the tensors of all ranks in rank order."""
        return self._all_gather(tensor, self.detector.ticket(what, self.exchange_id, tensor))

    def _all_gather(self, tensor: torch.Tensor, ticket: Ticket) -> torch.Tensor:
        out = tensor.new_empty((self.world_size, *tensor.shape))
        if tensor.numel():
            parts = list(bytes_of(out).view(self.world_size, -1).unbind(0))
            gather: Any = partial(dist.all_gather, parts, bytes_of(tensor), group=self._group, async_op=True)
            follow(self.detector, ticket, tensor, gather).wait()
        return out

    def broadcast(self, tensor: torch.Tensor, source: int, *, what: str) -> torch.Tensor:
        """Return the tensor of rank ``source``."""
        ticket = self.detector.ticket(what, self.exchange_id, tensor)
        result = tensor.clone(memory_format=torch.contiguous_format)
        send = partial(dist.broadcast, bytes_of(result), group=self._group, group_src=source, async_op=True)
        follow(self.detector, ticket, tensor, send).wait()
        return result

    def all_to_all(self, tensor: torch.Tensor, sizes: Sequence[Sequence[int]], *, what: str) -> torch.Tensor:
        """Return what every rank sends to this one, in rank order."""
        ticket = self.detector.ticket(what, self.exchange_id)
        given, taken = list(sizes[self.rank]), [row[self.rank] for row in sizes]
        out = tensor.new_empty(sum(taken))
        if any(map(sum, sizes)):
            swap = partial(dist.all_to_all_single, out, tensor, taken, given, group=self._group, async_op=True)
            follow(self.detector, ticket, tensor, swap).wait()
        return out

    def start_all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, what: str) -> PendingCollective:
        """Start reducing ``tensor`` in place."""
        ticket = self.detector.ticket(what, self.exchange_id, tensor)
        reduce = partial(dist.all_reduce, tensor, REDUCE_OPS[op], group=self._group, async_op=True)
        return follow(self.detector, ticket, tensor, reduce)

    def start_all_gather(self, out: torch.Tensor, tensor: torch.Tensor, *, what: str) -> PendingCollective:
        """Start gathering the ``tensor`` of every rank into a row of ``out``; both contiguous."""
        return self._start_bytes(ALL_GATHER, out, tensor, what)

    def start_all_to_all(self, out: torch.Tensor, tensor: torch.Tensor, *, what: str) -> PendingCollective:
        """Start sending row r of ``tensor`` to rank r, which receives it in ``out``; both contiguous."""
        return self._start_bytes(dist.all_to_all_single, out, tensor, what)

    def _start_bytes(self, collective: Any, out: torch.Tensor, tensor: torch.Tensor, what: str) -> PendingCollective:
        ticket = self.detector.ticket(what, self.exchange_id, tensor)
        send = partial(collective, bytes_of(out), bytes_of(tensor), group=self._group, async_op=True)
        return follow(self.detector, ticket, tensor, send)

    def channel_bytes(self, device: torch.device) -> int:
        """Return a size of which Gloo moves several at once, and NCCL one after the other."""
        return CPU_CHANNEL_BYTES if device.type == "cpu" else OTHER_CHANNEL_BYTES

    def channels(self, sizes: Sequence[ChannelSize], what: str = "gradients") -> list[BucketChannel]:
        """Return a channel for each size."""
        names = describe_channels(sizes, what)
        self.agree("; ".join(names))
        unsummed: list[HalfChannel] = []
        return [
            HalfChannel(self, size, name, unsummed) if size.dtype in HALF_PRECISION else TorchChannel(self, size, name)
            for size, name in zip(sizes, names, strict=True)
        ]

    def close(self) -> None:
        """Do nothing: torch's groups are closed where they were opened, in ``join``."""


class _Channel:
    """What the channels through torch's group have in common. A subclass sets ``body``."""

    body: torch.Tensor

    def __init__(self, group: TorchGroup, what: str) -> None:
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

    def __init__(self, group: TorchGroup, size: ChannelSize, what: str) -> None:
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

    def __init__(self, group: TorchGroup, size: ChannelSize, what: str, unsummed: list[HalfChannel]) -> None:
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
