# SPDX-License-Identifier: Apache-2.0
"""Operations begin and end here: arguments are checked, requests are queued, and ranks wait for results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.compat.horovod.errors import Refused
from rankwise.compat.horovod.negotiation.queue import OperationQueue, current_queue
from rankwise.compat.horovod.negotiation.request import POLLS, ROWS_MAY_DIFFER, OperationRequest, PendingOperation
from rankwise.compat.horovod.process_sets import ProcessSet, global_process_set, members_of
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rankwise.compat.horovod.process_sets import ProcessSet


ADDED_UP = (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What can be reduced; bfloat16 is more than Horovod takes."""
MOVED = (*ADDED_UP, torch.uint8, torch.int8, torch.int16, torch.bool)
"""What can be sent as it is; bfloat16 and bool are more than Horovod takes."""
_DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in MOVED}


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
    request = OperationRequest(
        kind=kind,
        name=queue.name(prefix, name, set_id),
        set_id=set_id,
        dtypes=tuple(_DTYPE_NAMES[tensor.dtype] for tensor in tensors),
        shapes=tuple(tuple(tensor.shape[first_dim:]) for tensor in tensors),
        device=tensors[0].device.type if tensors else "cpu",
        **fields,
    )
    sent = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
    return queue.submit(
        PendingOperation(request=request, tensors=sent, take=take, is_in_place=is_in_place, splits=splits)
    )


def member_of(process_set: ProcessSet, kind: str, queue: OperationQueue) -> int:
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


def poll(handle: int) -> bool:
    """Return whether an operation is done.

    Called by: every rank, at any of the calls that wait. There is no thread in the background: what is pending
    travels when ranks wait, and this call may wait until the other ranks come to a call of their own.

    Raises:
        ConfigurationError: there is no such handle, or its result has been taken.
    """
    queue = current_queue()
    operation = queue.handles.get(handle)
    if operation is None:
        raise ConfigurationError(
            f"Operation {handle!r} does not exist, or its result has already been returned.",
            do="call poll() before synchronize()",
        )
    if not operation.is_done:
        queue.run_round(POLLS, operation)
    return operation.is_done


def synchronize(handle: int) -> Any:  # noqa: ANN401 - whatever the operation comes to
    """Return what an operation comes to, once all its ranks have asked for it.

    Called by: every rank, at any of the calls that wait.

    Returns:
        A tensor; of a grouped operation a tuple of tensors; of an alltoall the tensor and the rows received from each
        member. ``None`` for a handle whose result has been taken.

    Raises:
        HorovodInternalError: the ranks asked for different things under its name, or all wait for each other.
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """
    queue = current_queue()
    operation = queue.handles.get(handle)
    if operation is None:
        return None
    try:
        queue.wait(operation)
    finally:
        del queue.handles[handle]
    return operation.result


def join(device: int = -1) -> int:  # noqa: ARG001 - zeros are made where the others' tensors are
    """Say that this rank has no more data: it takes part with zeros until every rank has joined.

    Called by: every rank, each when it is through.

    Zeros count: in an average as one of the ranks, in a minimum, maximum or product as the number zero. Operations that
    zeros cannot stand in for, allgather, broadcast, alltoall and reducescatter, raise ``HorovodInternalError`` on the
    ranks that call them while another rank has joined; the ranks that have joined stay so.

    Args:
        device: not needed; the zeros are made where the others' tensors are.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: the others wait for each other.
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """
    return current_queue().join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set has called it.

    Called by: every rank of the process set.

    Raises:
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """
    queue = current_queue()
    set_id = member_of(process_set, "barrier", queue)
    operation = PendingOperation(request=OperationRequest(kind="barrier", name="barrier", set_id=set_id))
    queue.hold(operation)
    queue.wait(operation)
