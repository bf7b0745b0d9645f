# SPDX-License-Identifier: Apache-2.0
"""``allgather`` and its kin: the rows of all ranks, one rank's after the other's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.compat.horovod.operations.api import MOVED, check, check_group, only, submit, synchronize
from rankwise.compat.horovod.operations.reducing import grouped_allreduce
from rankwise.compat.horovod.process_sets import ProcessSet, global_process_set
from rankwise.compat.horovod.reduce_ops import Average

if TYPE_CHECKING:
    from collections.abc import Sequence


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Put the rows of all ranks' tensors together, with gradients.

    Called by: every rank of the process set, with the same name and dtype; in any order towards other names.

    The gradient of a rank's rows is the average, not the sum, of what all ranks' results have for these rows.

    Args:
        tensor: [rows, ...]; the number of rows may differ between ranks.
        name: what the ranks' calls are matched by; without one, by how many came before.
        process_set: the ranks that take part.

    Returns:
        [all rows, ...], in rank order.

    Raises:
        ConfigurationError: a bad argument; or an operation of this name is pending.
        HorovodInternalError: the ranks asked for different things under its name, or all wait for each other.
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """
    gathered: tuple[torch.Tensor, ...] = _Allgather.apply(name, process_set, False, tensor)  # pyright: ignore[reportAssignmentType]
    return gathered[0]


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin what :func:`allgather` does, without gradients; return a handle for ``poll`` and ``synchronize``."""
    check(tensor, "allgather", MOVED, needs_rows=True)
    return submit("allgather", [tensor], name, process_set, only, prefix="allgather")


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Do what :func:`allgather` does with several tensors, all or none, under one name; with gradients."""
    tensors = check_group(tensors, "grouped_allgather")
    return _Allgather.apply(name, process_set, True, *tensors)  # pyright: ignore[reportReturnType]


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin what :func:`grouped_allgather` does, without gradients; return one handle for all."""
    tensors = check_group(tensors, "grouped_allgather")
    for tensor in tensors:
        check(tensor, "grouped_allgather", MOVED, needs_rows=True)
    return submit("allgather", tensors, name, process_set, tuple, prefix="grouped_allgather")


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:  # noqa: ANN401 - torch's
        name, process_set, is_grouped, *tensors = arguments
        handle = (
            grouped_allgather_async(tensors, name, process_set)
            if is_grouped
            else allgather_async(tensors[0], name, process_set)
        )
        gathered = synchronize(handle)
        ctx.process_set = process_set
        ctx.num_rows = [tensor.shape[0] for tensor in tensors]
        return gathered if is_grouped else (gathered,)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # noqa: ANN401 - torch's
        process_set = ctx.process_set
        own = process_set.rank()
        gradients = [gradient.contiguous() for gradient in grad_outputs]
        reduced = grouped_allreduce(gradients, op=Average, process_set=process_set)
        rows_of_rank = allgather(torch.tensor([ctx.num_rows]), process_set=process_set)
        starts = rows_of_rank[:own].sum(dim=0).tolist()
        parts = [
            gradient.narrow(0, start, num_rows)
            for gradient, start, num_rows in zip(reduced, starts, ctx.num_rows, strict=True)
        ]
        return (None, None, None, *parts)
