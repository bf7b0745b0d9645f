# SPDX-License-Identifier: Apache-2.0
"""Waiting: for an operation, for the other ranks, for the last of them to have no more data."""

from __future__ import annotations

from typing import Any

from rankwise.compat.horovod.pending import Pending
from rankwise.compat.horovod.process_sets import ProcessSet, global_process_set
from rankwise.compat.horovod.queue import current_queue
from rankwise.compat.horovod.request import POLLS, Request
from rankwise.compat.horovod.submission import member_of
from rankwise.errors import ConfigurationError


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
            f"There is no operation {handle!r}, or its result has been taken.", do="poll before synchronize"
        )
    if not operation.is_done:
        queue.go_round(POLLS, operation)
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
    operation = Pending(request=Request(kind="barrier", name="barrier", set_id=set_id))
    queue.hold(operation)
    queue.wait(operation)
