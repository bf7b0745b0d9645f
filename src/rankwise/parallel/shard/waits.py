# SPDX-License-Identifier: Apache-2.0
"""Gathering parameters and reducing gradients of sharded blocks on CPUs, with waits that end with a name.

torch's own waits know nothing of a rank that has failed elsewhere. On GPUs they are left to torch: the host does not
wait there. Used by shard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from rankwise.exchange.torch_group import Pending

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.watch import Watch


class WatchedAllGather(AllGather):
    """torch's gathering of a block's parameters."""

    def __init__(self, watch: Watch, channel: int, what: str) -> None:
        self._watch = watch
        self._channel = channel
        self._what = what

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for what is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: ARG002, FBT001, FBT002 - torch's signature; what runs next needs it
    ) -> None:
        """Gather, and wait."""
        ticket = self._watch.ticket(self._what, self._channel, input_tensor)
        work = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=True)
        Pending(self._watch, ticket, work).wait()


class WatchedReduceScatter(ReduceScatter):
    """torch's reduction of a block's gradients."""

    def __init__(self, watch: Watch, channel: int, what: str) -> None:
        self._watch = watch
        self._channel = channel
        self._what = what

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for what is reduced."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] - nothing is under way any more
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,  # noqa: ARG002, FBT001, FBT002
    ) -> None:
        """Reduce, and wait."""
        ticket = self._watch.ticket(self._what, self._channel, input_tensor)
        work = dist.reduce_scatter_single(output_tensor, input_tensor, cast("Any", op), group=group, async_op=True)
        Pending(self._watch, ticket, work).wait()
