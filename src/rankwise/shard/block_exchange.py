# SPDX-License-Identifier: Apache-2.0
"""How torch gathers the parameters of a block and reduces its gradients: in the memory of a host, or in torch's group.

Ranks of one host read each other's parts in memory that they share. Otherwise torch's collectives are followed, so that
a failed rank is named: torch's own waits do not notice a rank that has failed elsewhere. Used by shard.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from rankwise.comm.backends.block_slots import GatherSlots, ReduceSlots
from rankwise.comm.backends.mapping import PAGE_BYTES, rounded_up
from rankwise.comm.backends.pending_collective import follow
from rankwise.comm.backends.shared_memory import SharedMemory
from rankwise.comm.backends.torch_group import ALL_GATHER
from rankwise.errors import fold_values
from rankwise.log import warn
from rankwise.replicate.device_mesh import exchange_along
from rankwise.torch_private.autograd import in_backward
from rankwise.torch_private.fsdp import AllGather, ReduceScatter, groups_of, params_of, sharded_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from rankwise.comm.backends.block_slots import PendingRound
    from rankwise.comm.session import Session
    from rankwise.health.failure_detector import FailureDetector

# Renamed in torch 2.13, which deprecates the names that 2.12 has.
_is_renamed = hasattr(dist, "reduce_scatter_single")
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single" if _is_renamed else "reduce_scatter_tensor")


def exchange_blocks(model: nn.Module, name: str, session: Session, policy: MixedPrecisionPolicy) -> SharedMemory | None:
    """Have the blocks of a sharded model exchanged in shared memory, and their waits name a peer that fails.

    Called by: every rank.

    Args:
        model: sharded already.
        name: of the model, before torch renamed it.
        session: the open one.
        policy: the dtypes in which blocks are gathered and reduced.

    Returns:
        The exchange whose memory they pass through; ``None`` for torch's group.
    """
    if session.exchange is None or session.axes is None:
        return None
    detector = session.exchange.detector
    exchange_id = detector.recorder.new_exchange_id(session.axes.ranks_along(session.world.rank, "dp_shard"))
    along = exchange_along("dp_shard")
    gather_slots = reduce_slots = None
    if isinstance(along, SharedMemory) and len(along.hosts) == 1:
        gather_slots, reduce_slots = _slots(along, *_largest_bytes(model, along.world_size, policy))
    for block, module in model.named_modules():
        if isinstance(module, FSDPModule):
            what = f"{block} of {name}" if block else name
            module.set_custom_all_gather(BlockGather(detector, exchange_id, f"parameters of {what}", gather_slots))
            module.set_custom_reduce_scatter(BlockReduce(detector, exchange_id, f"gradients of {what}", reduce_slots))
    return along if isinstance(along, SharedMemory) and gather_slots is not None else None


def _slots(along: SharedMemory, gather_bytes: int, reduce_bytes: int) -> tuple[GatherSlots | None, ReduceSlots | None]:
    """Open memory for blocks of up to these sizes."""
    num_ranks, rank = along.world_size, along.rank
    gather_bytes, reduce_bytes = (rounded_up(one, num_ranks * PAGE_BYTES) for one in (gather_bytes, reduce_bytes))
    gather_start = PAGE_BYTES
    reduce_start = gather_start + GatherSlots.num_bytes(num_ranks, gather_bytes)
    end = reduce_start + ReduceSlots.num_bytes(num_ranks, reduce_bytes)
    own_parts = [
        *GatherSlots.own_parts(gather_start, gather_bytes, rank, num_ranks),
        *ReduceSlots.own_parts(reduce_start, reduce_bytes, rank, num_ranks),
    ]
    memory, reasons = along.host_memory(end, own_parts)
    if memory is None:
        warn(f"blocks go through Gloo: no shared memory of {end / 2**20:.0f} MiB\n{fold_values(reasons)}")
        return None, None
    return (
        GatherSlots(along, memory, gather_start, gather_bytes),
        ReduceSlots(along, memory, reduce_start, reduce_bytes),
    )


def _largest_bytes(model: nn.Module, num_ranks: int, policy: MixedPrecisionPolicy) -> tuple[int, int]:
    """Return the most bytes of the parameters, and of the gradients, of one block."""
    parameters = gradients = 0
    for group in groups_of(model):
        whole = reduced = 0
        for one in params_of(group):
            sharded = sharded_of(one)
            rows, *rest = sharded.shape
            # torch pads the rows of each parameter, so that all parts are equally long.
            num = rounded_up(rows, num_ranks) * prod(rest)
            dtype = policy.param_dtype or sharded.dtype
            whole += num * dtype.itemsize
            reduced += num * (policy.reduce_dtype or dtype).itemsize
        parameters, gradients = max(parameters, whole), max(gradients, reduced)
    return parameters, gradients


class _Watched:
    """The common part: memory from torch's allocator, and a collective that the failure detector follows."""

    def __init__(self, detector: FailureDetector, exchange_id: int, what: str) -> None:
        self._detector = detector
        self._exchange_id = exchange_id
        self._what = what

    def _wait(self, tensor: torch.Tensor, start: Callable[[], dist.Work | None]) -> None:
        ticket = self._detector.ticket(self._what, self._exchange_id, tensor)
        follow(self._detector, ticket, tensor, start).wait()


class BlockGather(_Watched, AllGather):
    """Gathers a block's parameters for torch."""

    def __init__(self, detector: FailureDetector, exchange_id: int, what: str, slots: GatherSlots | None) -> None:
        super().__init__(detector, exchange_id, what)
        self._slots = slots

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for the parts of all ranks."""
        lent = None if self._slots is None else self._slots.lend(int(prod(size)), dtype)
        return torch.empty(*size, dtype=dtype, device=device) if lent is None else lent

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: ARG002, FBT001, FBT002 - torch's signature; what runs next needs it
    ) -> dist.Work | None:
        """Gather; in backward, where torch gathers ahead, without waiting."""
        if self._slots is None or not self._slots.is_lent(output_tensor):
            gather = partial(ALL_GATHER, group=group, async_op=True)
            self._wait(input_tensor, lambda: gather(output_tensor, input_tensor))
            return None
        pending = self._slots.fill(self._what, input_tensor.nbytes)
        if in_backward():
            return _Gathering(pending)
        pending.wait()
        return None


class _Gathering(dist.Work):
    """Parameters that are being gathered."""

    def __init__(self, pending: PendingRound) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]  # noqa: ARG002 - torch's
        """Wait for the parts of all ranks."""
        self._pending.wait()
        return True


class BlockReduce(_Watched, ReduceScatter):
    """Reduces a block's gradients for torch."""

    def __init__(self, detector: FailureDetector, exchange_id: int, what: str, slots: ReduceSlots | None) -> None:
        super().__init__(detector, exchange_id, what)
        self._slots = slots
        self._num_lent = 0
        """The size of the input that torch has asked for: what is smaller is then the result, which stays."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for the gradients of all ranks, and then for the sum of this rank's part."""
        lent, num_elements = None, int(prod(size))
        if self._slots is not None and num_elements >= self._num_lent:
            lent = self._slots.lend(num_elements, dtype)
            self._num_lent = num_elements
        return torch.empty(*size, dtype=dtype, device=device) if lent is None else lent

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] - nothing is under way any more
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,  # noqa: ARG002, FBT001, FBT002
    ) -> None:
        """Reduce, and wait."""
        self._num_lent = 0
        if self._slots is not None and self._slots.is_lent(input_tensor) and op in _SUMS:
            self._slots.reduce(self._what, output_tensor, averages=op == dist.ReduceOp.AVG)
            return
        start = partial(_reduce_scatter, output_tensor, input_tensor, cast("Any", op), group=group, async_op=True)
        self._wait(input_tensor, start)


_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
