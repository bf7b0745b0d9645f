# SPDX-License-Identifier: Apache-2.0
"""Objects of one rank, or of all, given to every rank."""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import torch

from rankwise.compat.horovod.initialization import rank
from rankwise.compat.horovod.operations.broadcasting import broadcast
from rankwise.compat.horovod.operations.gathering import allgather
from rankwise.compat.horovod.process_sets import ProcessSet, global_process_set

T = TypeVar("T")


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """Return the object of ``root_rank``.

    Called by: every rank of the process set. The ranks of a job trust each other: objects are pickled.

    Args:
        obj: counts on ``root_rank`` only, which gets this very object back.
        root_rank: a rank of the world.
        name: what the ranks' calls are matched by.
        process_set: the ranks that take part.
    """
    what = name or "broadcast_object"
    is_root = rank() == root_rank
    payload = _bytes(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    num_bytes = int(broadcast(torch.tensor([payload.numel()]), root_rank, f"{what}.sz", process_set=process_set))
    if not is_root:
        payload = torch.empty(num_bytes, dtype=torch.uint8)
    received = broadcast(payload, root_rank, f"{what}.t", process_set=process_set)
    return obj if is_root else _object(received)


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """Return the objects of all ranks, in rank order.

    Called by: every rank of the process set. The ranks of a job trust each other: objects are pickled.

    Args:
        obj: of this rank; objects may differ in type and size.
        name: what the ranks' calls are matched by.
        process_set: the ranks that take part.
    """
    what = name or "allgather_object"
    payload = _bytes(obj)
    sizes = allgather(torch.tensor([payload.numel()]), name=f"{what}.sz", process_set=process_set)
    rows = allgather(payload, name=f"{what}.t", process_set=process_set)
    return [_object(part) for part in rows.split(sizes.tolist())]


def _bytes(obj: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)


def _object(data: torch.Tensor) -> Any:  # noqa: ANN401 - whatever it was
    return pickle.loads(data.numpy().tobytes())  # noqa: S301 - from a rank of this job
