# SPDX-License-Identifier: Apache-2.0
"""Tensors travel through torch's process group (Gloo on CPU, NCCL on GPUs).

Every wait goes through the watch, so that it ends with a name when a peer fails or stays away. Takes and
gives plain contiguous tensors; types and trees are the business of ``collectives``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from rankwise.watch import Ticket, Watch

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class Pending:
    """A collective under way."""

    __slots__ = ("_ticket", "_watch", "_work")

    def __init__(self, watch: Watch, ticket: Ticket, work: dist.Work) -> None:
        self._watch = watch
        self._ticket = ticket
        self._work = work

    def wait(self) -> None:
        """Return when the result is there; raise what the watch found out if it will not come."""
        self._watch.wait(self._ticket, self._is_done)

    def _is_done(self, seconds: float) -> bool:
        try:
            self._work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not self._work.is_completed():
                return False
            # It failed, or it has completed since the time was up: this tells, and does not wait.
            self._work.wait()
        return True


class TorchGroup:
    """torch's default process group, opened by ``process_group``, or another over the same ranks."""

    def __init__(self, watch: Watch, rank: int, world_size: int, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.watch = watch
        self._group = group

    def twin(self) -> TorchGroup:
        """Return another group of the same ranks, whose collectives need no order towards this one's.

        Called by: every rank, in the same order.
        """
        group = dist.new_group()
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"torch.distributed.new_group() gave {group!r} for a group of all ranks")
        return TorchGroup(self.watch, self.rank, self.world_size, group)

    def all_reduce_(self, tensor: torch.Tensor, op: str = "sum", *, what: str) -> Pending:
        """Start reducing ``tensor`` in place over all ranks; contiguous, same shape and dtype on each."""
        ticket = self.watch.ticket(what)
        return self._pending(ticket, dist.all_reduce(tensor, REDUCE_OPS[op], group=self._group, async_op=True))

    def all_gather(self, tensor: torch.Tensor, *, what: str) -> torch.Tensor:
        """Return [world_size, *tensor.shape], the tensors of all ranks in rank order."""
        ticket = self.watch.ticket(what)
        out = tensor.new_empty((self.world_size, *tensor.shape))
        if tensor.numel():
            parts = list(out.unbind(0))
            self._pending(ticket, dist.all_gather(parts, tensor, group=self._group, async_op=True)).wait()
        return out

    def broadcast_(self, tensor: torch.Tensor, source: int, *, what: str) -> Pending:
        """Start overwriting ``tensor`` on all ranks with that of rank ``source``; contiguous."""
        ticket = self.watch.ticket(what)
        return self._pending(ticket, dist.broadcast(tensor, source, group=self._group, async_op=True))

    def _pending(self, ticket: Ticket, work: dist.Work | None) -> Pending:
        if work is None:
            message = "torch's process group did not return a handle"
            raise RuntimeError(message)
        return Pending(self.watch, ticket, work)
