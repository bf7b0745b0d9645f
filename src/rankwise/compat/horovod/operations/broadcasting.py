# SPDX-License-Identifier: Apache-2.0
"""``broadcast`` and its kin: one rank's tensor for all."""

from __future__ import annotations

from typing import Any

import torch

from rankwise.compat.horovod.errors import Refused
from rankwise.compat.horovod.negotiation.queue import current_queue
from rankwise.compat.horovod.operations.api import MOVED, check, only, submit, synchronize
from rankwise.compat.horovod.operations.reducing import allreduce
from rankwise.compat.horovod.process_sets import ProcessSet, global_process_set, members_of
from rankwise.compat.horovod.reduce_ops import Average
from rankwise.errors import fold_ranks


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Give every rank the tensor of ``root_rank``, with gradients.

    Called by: every rank of the process set, with the same name, shape and dtype; in any order towards other names.

    The gradient of the root's tensor is the average of the gradients of all ranks' results; other ranks' is zero.

    Args:
        tensor: any shape; on other ranks than the root only its shape and dtype count. It is not changed.
        root_rank: by its number in the world, also with a process set.
        name: what the ranks' calls are matched by; without one, by how many came before.
        process_set: the ranks that take part.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        ConfigurationError: a bad argument; or an operation of this name is pending.
        HorovodInternalError: the ranks asked for different things under its name, or all wait for each other.
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """
    return _Broadcast.apply(tensor, root_rank, name, process_set)  # pyright: ignore[reportReturnType]


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin what :func:`broadcast` does, without gradients; return a handle for ``poll`` and ``synchronize``."""
    return _begin(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Do what :func:`broadcast` does, in place and without gradients; return the tensor."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin what :func:`broadcast_` does; return a handle for ``poll`` and ``synchronize``."""
    return _begin(tensor, root_rank, name, process_set, is_in_place=True)


def _begin(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    is_in_place: bool = False,
) -> int:
    check(tensor, "broadcast", MOVED)
    ranks = current_queue().members[members_of(process_set)].ranks
    if root_rank not in ranks:
        raise Refused(
            f"broadcast got root_rank={root_rank}, which is not one of its ranks.",
            evidence=f"it is among {fold_ranks(ranks)}",
            do="pass one of them as root_rank=, by its rank in the world",
        )
    return submit(
        "broadcast",
        [tensor],
        name,
        process_set,
        (lambda _: tensor) if is_in_place else only,
        prefix="broadcast",
        is_in_place=is_in_place,
        root=int(root_rank),
    )


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:  # noqa: ANN401 - torch's
        tensor, ctx.root_rank, name, ctx.process_set = arguments
        return synchronize(broadcast_async(tensor, ctx.root_rank, name, ctx.process_set))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # noqa: ANN401 - torch's
        gradient = allreduce(grad_outputs[0].contiguous(), op=Average, process_set=ctx.process_set)
        is_root = current_queue().session.world.rank == ctx.root_rank
        return gradient if is_root else torch.zeros_like(gradient), None, None, None
