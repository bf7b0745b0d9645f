# SPDX-License-Identifier: Apache-2.0
"""The start and the end of every operation: arguments are checked, requests are queued, ranks wait for results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.compat.horovod.exceptions import Refused
from rankwise.compat.horovod.process_sets import ProcessSet, global_process_set, members_of
from rankwise.compat.horovod.queue import OperationQueue, current_queue
from rankwise.compat.horovod.request import POLLS, ROWS_MAY_DIFFER, OperationRequest, PendingOperation
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rankwise.compat.horovod.process_sets import ProcessSet


_REDUCED = (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that can be reduced; Horovod does not take bfloat16."""
_MOVED = (*_REDUCED, torch.uint8, torch.int8, torch.int16, torch.bool)
"""Dtypes that can be sent unchanged; Horovod takes neither bfloat16 nor bool."""
_DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _MOVED}


def submit(
    kind: str,
    tensors: Sequence[torch.Tensor],
    prefix: str,
    name: str | None,
    process_set: ProcessSet,
    *,
    make_result: Callable[[list[torch.Tensor]], Any] = tuple,
    is_in_place: bool = False,
    splits: Sequence[int] = (),
    **fields: Any,
) -> int:
    """Queue an operation on checked tensors; return its handle.

    It is matched by ``name`` among the operations with the same ``prefix``. ``make_result`` makes the result of the
    call from the tensors that arrive; ``fields`` are other fields of the request.
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
    operation = PendingOperation(
        request=request,
        members=queue.members[set_id],
        tensors=[tensor.detach() if tensor.requires_grad else tensor for tensor in tensors],
        make_result=make_result,
        is_in_place=is_in_place,
        splits=splits,
    )
    return queue.submit(operation)


def with_gradients(
    tensors: Sequence[torch.Tensor],
    *,
    there: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    back: Callable[[list[torch.Tensor], list[torch.Size]], Sequence[torch.Tensor]],
) -> Sequence[torch.Tensor]:
    """Return ``there(tensors)``; ``back`` makes their gradients from those of the results and their shapes.

    ``back`` must not refer to ``tensors``, whose memory would be kept until backward.
    """
    if not any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors):
        # torch's machinery for gradients would take a tenth of the time of a small operation.
        return there(tensors)
    return _WithGradients.apply(there, back, *tensors)  # pyright: ignore[reportReturnType]


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
        there, ctx.back, *tensors = arguments
        results = tuple(there(tensors))
        ctx.shapes = [tensor.shape for tensor in tensors]
        return results

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return None, None, *ctx.back([gradient.contiguous() for gradient in grad_outputs], ctx.shapes)


def member_of(process_set: ProcessSet, kind: str, queue: OperationQueue) -> int:
    """Return the number of a process set; raise if it is not in use, or if this rank is not in it."""
    set_id = members_of(process_set)
    own = queue.session.world.rank
    if own not in queue.members[set_id].ranks:
        raise Refused(
            f"Rank {own} called {kind} of a process set that it is not in.",
            evidence=str(process_set),
            do="call it on its ranks only: `if process_set.included():`",
        )
    return set_id


def check(tensors: Sequence[torch.Tensor], kind: str, called: str) -> None:
    """Raise unless an operation takes these tensors: dense, contiguous, of certain dtypes. ``called`` is its name."""
    dtypes = _REDUCED if kind in {"allreduce", "adasum", "reducescatter"} else _MOVED
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ConfigurationError(
                f"{called} takes tensors, not {type(tensor).__name__}.",
                do="use torch.as_tensor(), or rankwise.all_reduce()",
            )
        if tensor.layout != torch.strided:
            raise ConfigurationError(
                f"{called} does not take {tensor.layout} tensors.", do="use hvd.sparse_allreduce_async(), or to_dense()"
            )
        if tensor.dtype not in dtypes:
            raise ConfigurationError(
                f"{called} does not take {tensor.dtype}.",
                evidence="it takes " + ", ".join(_DTYPE_NAMES[dtype] for dtype in dtypes),
                do="convert the tensor",
            )
        if not tensor.is_contiguous():
            raise ConfigurationError(
                f"{called} takes contiguous tensors only.",
                evidence=f"shape {list(tensor.shape)}, strides {list(tensor.stride())}",
                do="pass tensor.contiguous()",
            )
        if kind in {"allgather", "alltoall", "reducescatter"} and tensor.dim() == 0:
            raise Refused(
                f"{called} takes tensors of at least one dimension.", do="pass tensor.reshape(1) for a single number"
            )


def check_group(tensors: Iterable[torch.Tensor], kind: str) -> list[torch.Tensor]:
    """Return the tensors of a grouped operation; raise if there are none, or if they are on several devices."""
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

    Called by: every rank, at any of the calls that wait. There is no background thread: pending operations are carried
    out when ranks wait, and this call may wait until the other ranks make such a call.

    Raises:
        ConfigurationError: the handle does not exist, or its result has already been returned.
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


def synchronize(handle: int) -> Any:
    """Return the result of an operation, once all its ranks have called it.

    Called by: every rank, at any of the calls that wait.

    Returns:
        A tensor; for a grouped operation a tuple of tensors; for an alltoall the tensor and the number of rows received
        from each member. ``None`` for a handle whose result has already been returned.

    Raises:
        HorovodInternalError: the ranks passed different arguments under its name, or all wait for each other.
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


def join(device: int = -1) -> int:  # noqa: ARG001 - zeros are created where the others' tensors are
    """Report that this rank has no more data: it takes part with zeros until every rank has joined.

    Called by: every rank, each when it has finished its data.

    Zeros count: in an average as one of the ranks, in a minimum, maximum or product as the number zero. Operations that
    zeros cannot stand in for (allgather, broadcast, alltoall and reducescatter) raise ``HorovodInternalError`` on the
    ranks that call them while another rank has joined; ranks that have joined remain joined.

    Args:
        device: not used; zeros are created where the others' tensors are.

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
    request = OperationRequest(kind="barrier", name="barrier", set_id=set_id)
    operation = PendingOperation(request=request, members=queue.members[set_id])
    queue.hold(operation)
    queue.wait(operation)
