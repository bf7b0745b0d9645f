# SPDX-License-Identifier: Apache-2.0
"""All operations, under one roof."""

from rankwise.compat.horovod.broadcasting import broadcast, broadcast_, broadcast_async, broadcast_async_
from rankwise.compat.horovod.exchanging import alltoall, alltoall_async
from rankwise.compat.horovod.gathering import allgather, allgather_async, grouped_allgather, grouped_allgather_async
from rankwise.compat.horovod.reducing import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from rankwise.compat.horovod.scattering import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from rankwise.compat.horovod.sparse import sparse_allreduce_async
from rankwise.compat.horovod.waiting import barrier, join, poll, synchronize

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]
