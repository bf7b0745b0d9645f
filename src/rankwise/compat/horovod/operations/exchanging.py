# SPDX-License-Identifier: Apache-2.0
"""``alltoall``: each rank's rows are divided among all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.compat.horovod.errors import Refused
from rankwise.compat.horovod.negotiation.queue import current_queue
from rankwise.compat.horovod.operations.api import MOVED, check, submit, synchronize
from rankwise.compat.horovod.process_sets import ProcessSet, global_process_set, members_of

if TYPE_CHECKING:
    from collections.abc import Sequence


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send each rank some of the rows, and receive what it sends, with gradients.

    Called by: every rank of the process set, with the same name and dtype; in any order towards other names.

    Gradients go back the way that rows came.

    Args:
        tensor: [rows, ...]; the number of rows may differ between ranks.
        splits: [ranks of the process set], how many rows go to each, int32; by default all the same. Rows beyond
            their sum stay.
        name: what the ranks' calls are matched by; without one, by how many came before.
        process_set: the ranks that take part.

    Returns:
        [received rows, ...], in the order of the ranks that sent them; where ``splits`` was given, also how many
        came from each, as int32 [ranks].

    Raises:
        ConfigurationError: a bad argument; or an operation of this name is pending.
        HorovodInternalError: the ranks asked for different things under its name, or all wait for each other.
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _Alltoall.apply(tensor, splits, name, process_set)  # pyright: ignore[reportAssignmentType]
    return result[0] if splits is None else result


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin what :func:`alltoall` does, without gradients; return a handle.

    ``synchronize`` gives the rows and how many came from each rank, also without ``splits``.
    """
    check(tensor, "alltoall", MOVED, needs_rows=True)
    counts = _counts(tensor, splits, process_set)
    device = splits.device if isinstance(splits, torch.Tensor) else torch.device("cpu")

    def take(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        rows, received = tensors
        return rows, received.to(device)

    return submit("alltoall", [tensor], name, process_set, take, prefix="alltoall", splits=counts)


def _counts(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, process_set: ProcessSet) -> list[int]:
    """Return how many rows go to each rank of the process set."""
    size = len(current_queue().members[members_of(process_set)].ranks)
    num_rows = tensor.shape[0]
    if isinstance(splits, torch.Tensor):
        if splits.dtype != torch.int32 or splits.dim() > 1:
            raise Refused(
                "alltoall requires splits= as a one-dimensional int32 tensor.",
                evidence=f"{splits.dtype}, shape {list(splits.shape)}",
                do="pass torch.tensor([...], dtype=torch.int32)",
            )
        counts: list[int] = splits.flatten().tolist()
    else:
        counts = [] if splits is None else [int(count) for count in splits]
    if not counts:
        if num_rows % size:
            raise Refused(
                f"alltoall cannot divide {num_rows} rows equally among {size} ranks.",
                do="pass splits=, the number of rows for each rank",
            )
        return [num_rows // size] * size
    if len(counts) != size or sum(counts) > num_rows or min(counts) < 0:
        raise Refused(
            f"alltoall cannot divide {num_rows} rows among {size} ranks by splits={counts}.",
            do="pass one number per rank, each at least 0, with a sum of at most the number of rows",
        )
    return counts


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401 - torch's
        tensor, splits, name, ctx.process_set = arguments
        rows, received = synchronize(alltoall_async(tensor, splits, name, ctx.process_set))
        ctx.received = received
        ctx.num_rows = tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # noqa: ANN401 - torch's
        back, _ = alltoall(grad_outputs[0].contiguous(), splits=ctx.received, process_set=ctx.process_set)
        # Rows that stayed have no part in any result.
        stayed = back.new_zeros(ctx.num_rows - back.shape[0], *back.shape[1:])
        return torch.cat([back, stayed]), None, None, None
