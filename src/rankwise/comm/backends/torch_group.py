# SPDX-License-Identifier: Apache-2.0
"""Send tensors through torch's process group (Gloo on CPU, NCCL on GPUs).

Every collective is followed, by the thread that waits for it or by one that follows the device, so that it ends with
the rank's name when a peer fails or does not arrive. Takes and returns plain contiguous tensors; ``collectives``
handles types and trees.
"""

from __future__ import annotations

import zlib
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rankwise.comm.backends.gather_text import WHAT_EACH_CALLED, bytes_of_rows, calls_differ, row_of
from rankwise.comm.backends.protocol import NOTE_BYTES, describe_channels
from rankwise.comm.backends.torch_channel import HALF_PRECISION, HalfChannel, TorchChannel
from rankwise.health.collective_timeout import SLICE_SECONDS, CollectiveWait
from rankwise.health.diagnosis import is_of_a_signal_handler
from rankwise.health.queued_collectives import order_stream
from rankwise.tensors.arrays import bytes_of
from rankwise.torch_private.groups import next_number, open_among

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.comm.backends.protocol import BucketChannel, ChannelSize
    from rankwise.comm.backends.torch_channel import Pending
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


def handle_of(work: dist.Work | None) -> dist.Work:
    """Return torch's handle of a collective that has started."""
    if work is None:
        message = "torch's process group did not return a handle"
        raise RuntimeError(message)
    return work


class PendingCollective:
    """A pending collective of CPU tensors."""

    __slots__ = ("_detector", "_ticket", "_work")

    def __init__(self, detector: FailureDetector, ticket: Ticket, work: dist.Work | None) -> None:
        self._detector = detector
        self._ticket = ticket
        self._work = handle_of(work)

    def wait(self) -> None:
        """Return when the result is ready; raise the failure detector's error if it will not be."""
        with CollectiveWait(self._detector, self._ticket) as wait:
            while not self._is_done(SLICE_SECONDS):
                wait.check()

    def _is_done(self, seconds: float) -> bool:
        """Wait for at most ``seconds``, and return whether the result is ready."""
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


class QueuedCollective:
    """A collective that has been queued on the device."""

    __slots__ = ("_detector", "_ticket", "_work")

    def __init__(self, detector: FailureDetector, ticket: Ticket, work: dist.Work) -> None:
        self._detector = detector
        self._ticket = ticket
        self._work = work

    def wait(self) -> None:
        """Have what this thread queues next on the device wait for the result. The CPU does not wait."""
        if self._detector.error is not None:
            raise self._detector.error
        order_stream(self._detector, self._ticket, self._work)


def follow(
    detector: FailureDetector, ticket: Ticket, tensor: torch.Tensor, start: Callable[[], dist.Work | None]
) -> Pending:
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
        return PendingCollective(detector, ticket, start())
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

    def start_all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, what: str) -> Pending:
        """Start reducing ``tensor`` in place."""
        ticket = self.detector.ticket(what, self.exchange_id, tensor)
        reduce = partial(dist.all_reduce, tensor, REDUCE_OPS[op], group=self._group, async_op=True)
        return follow(self.detector, ticket, tensor, reduce)

    def start_all_gather(self, out: torch.Tensor, tensor: torch.Tensor, *, what: str) -> Pending:
        """Start gathering the ``tensor`` of every rank into a row of ``out``; both contiguous."""
        return self._start_bytes(ALL_GATHER, out, tensor, what)

    def start_all_to_all(self, out: torch.Tensor, tensor: torch.Tensor, *, what: str) -> Pending:
        """Start sending row r of ``tensor`` to rank r, which receives it in ``out``; both contiguous."""
        return self._start_bytes(dist.all_to_all_single, out, tensor, what)

    def _start_bytes(self, collective: Any, out: torch.Tensor, tensor: torch.Tensor, what: str) -> Pending:
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
