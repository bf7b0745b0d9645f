# SPDX-License-Identifier: Apache-2.0
"""Gathers parameters and reduces gradients of sharded blocks, followed so that a failed rank is named.

torch's own waits do not notice a rank that has failed elsewhere. Used by shard.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from rankwise.comm.backends.torch_group import ALL_GATHER, follow
from rankwise.torch_private.fsdp import AllGather, ReduceScatter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.health.failure_detector import FailureDetector

# Renamed in torch 2.13, which deprecates the names that 2.12 has.
_is_renamed = hasattr(dist, "reduce_scatter_single")
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single" if _is_renamed else "reduce_scatter_tensor")


class _Watched:
    """The common part: memory from torch's allocator, and a collective that the failure detector follows."""

    def __init__(self, detector: FailureDetector, exchange_id: int, what: str) -> None:
        self._detector = detector
        self._exchange_id = exchange_id
        self._what = what

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for the result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _wait(self, tensor: torch.Tensor, start: Callable[[], dist.Work | None]) -> None:
        ticket = self._detector.ticket(self._what, self._exchange_id, tensor)
        follow(self._detector, ticket, tensor, start).wait()


class WatchedAllGather(_Watched, AllGather):
    """torch's gathering of a block's parameters."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: ARG002, FBT001, FBT002 - torch's signature; what runs next needs it
    ) -> None:
        """Gather, and wait."""
        gather = partial(ALL_GATHER, group=group, async_op=True)
        self._wait(input_tensor, lambda: gather(output_tensor, input_tensor))


class WatchedReduceScatter(_Watched, ReduceScatter):
    """torch's reduction of a block's gradients."""

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] - nothing is under way any more
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,  # noqa: ARG002, FBT001, FBT002
    ) -> None:
        """Reduce, and wait."""
        start = partial(_reduce_scatter, output_tensor, input_tensor, cast("Any", op), group=group, async_op=True)
        self._wait(input_tensor, start)
