# SPDX-License-Identifier: Apache-2.0
"""Send tensors through torch's process group: Gloo on CPU, NCCL on GPUs.

Every collective is followed, by the thread that waits for it or by one that follows the device, so that it ends with
the rank's name when a peer fails or does not arrive. Takes and returns plain contiguous tensors; ``collectives``
handles types and trees.
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rankwise.comm.backends.pending_collective import follow
from rankwise.comm.backends.protocol import (
    NOTE_BYTES,
    WHAT_EACH_CALLED,
    bytes_of_rows,
    calls_differ,
    describe_channels,
    row_of,
)
from rankwise.comm.backends.torch_channels import HALF_PRECISION, HalfChannel, TorchChannel
from rankwise.tensors.arrays import bytes_of
from rankwise.torch_private.groups import next_number, open_among

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.pending_collective import PendingCollective
    from rankwise.comm.backends.protocol import BucketChannel, ChannelSize
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
