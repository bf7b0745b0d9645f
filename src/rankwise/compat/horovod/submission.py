# SPDX-License-Identifier: Apache-2.0
"""Checking what an operation was given, and noting it in the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.compat.horovod.errors import Refused
from rankwise.compat.horovod.pending import Pending
from rankwise.compat.horovod.process_sets import members_of
from rankwise.compat.horovod.queue import Queue, current_queue
from rankwise.compat.horovod.request import ROWS_MAY_DIFFER, Request
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rankwise.compat.horovod.process_sets import ProcessSet

ADDED_UP = (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What can be reduced; bfloat16 is more than Horovod takes."""
MOVED = (*ADDED_UP, torch.uint8, torch.int8, torch.int16, torch.bool)
"""What can be sent as it is; bfloat16 and bool are more than Horovod takes."""
_WORDS = {dtype: str(dtype).removeprefix("torch.") for dtype in MOVED}


def submit(
    kind: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    take: Callable[[list[torch.Tensor]], Any],
    *,
    prefix: str,
    is_in_place: bool = False,
    splits: Sequence[int] = (),
    **fields: Any,  # noqa: ANN401 - fields of Request
) -> int:
    """Note an operation of checked tensors; return its handle.

    Args:
        kind: what is to be done.
        tensors: what this rank gives.
        name: the user's.
        process_set: who takes part.
        take: makes the call's result of what arrives.
        prefix: of the names that this operation is matched among.
        is_in_place: whether what arrives is written into ``tensors``.
        splits: how many rows go to each member, of an alltoall.
        fields: what else the ranks have to agree on.
    """
    queue = current_queue()
    set_id = member_of(process_set, kind, queue)
    first_dim = 1 if kind in ROWS_MAY_DIFFER else 0
    request = Request(
        kind=kind,
        name=queue.name(prefix, name, set_id),
        set_id=set_id,
        dtypes=tuple(_WORDS[tensor.dtype] for tensor in tensors),
        shapes=tuple(tuple(tensor.shape[first_dim:]) for tensor in tensors),
        device=tensors[0].device.type if tensors else "cpu",
        **fields,
    )
    sent = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
    return queue.submit(Pending(request=request, tensors=sent, take=take, is_in_place=is_in_place, splits=splits))


def member_of(process_set: ProcessSet, kind: str, queue: Queue) -> int:
    """Return the number of a process set that this rank is in.

    Raises:
        Refused: it is not in it, or the set is not in use.
    """
    set_id = members_of(process_set)
    own = queue.session.world.rank
    if own not in queue.members[set_id].ranks:
        raise Refused(
            f"Rank {own} called {kind} of a process set that it is not in.",
            evidence=str(process_set),
            do="call it on its ranks only: `if process_set.included():`",
        )
    return set_id


def check(tensor: torch.Tensor, kind: str, dtypes: Sequence[torch.dtype], *, needs_rows: bool = False) -> None:
    """Hold a tensor to be one that an operation takes.

    Raises:
        ConfigurationError: it is none, is sparse, of another dtype, not contiguous, or has no first dimension.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ConfigurationError(
            f"{kind} takes tensors, not {type(tensor).__name__}.", do="use torch.as_tensor(), or rankwise.all_reduce()"
        )
    if tensor.layout != torch.strided:
        raise ConfigurationError(
            f"{kind} does not take {tensor.layout} tensors.", do="use hvd.sparse_allreduce_async(), or to_dense()"
        )
    if tensor.dtype not in dtypes:
        raise ConfigurationError(
            f"{kind} does not take {tensor.dtype}.",
            evidence="it takes " + ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes),
            do="convert the tensor",
        )
    if not tensor.is_contiguous():
        raise ConfigurationError(
            f"{kind} takes contiguous tensors only.",
            evidence=f"shape {list(tensor.shape)}, strides {list(tensor.stride())}",
            do="pass tensor.contiguous()",
        )
    if needs_rows and tensor.dim() == 0:
        raise Refused(
            f"{kind} takes tensors of at least one dimension.", do="pass tensor.reshape(1) for a single number"
        )


def check_group(tensors: Iterable[torch.Tensor], kind: str) -> list[torch.Tensor]:
    """Return the tensors of a grouped operation, held to be some, of one device.

    Raises:
        ConfigurationError: they are not.
    """
    given = list(tensors)
    if not given:
        raise ConfigurationError(f"{kind} was given no tensors.", do="pass a list of at least one")
    devices = {str(tensor.device) for tensor in given if isinstance(tensor, torch.Tensor)}
    if len(devices) > 1:
        raise ConfigurationError(
            f"{kind} takes tensors of one device.",
            evidence=", ".join(sorted(devices)),
            do="make one call per device",
        )
    return given


def only(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the one tensor of an operation on one."""
    (tensor,) = tensors
    return tensor
