# SPDX-License-Identifier: Apache-2.0
"""Horovod's API on rankwise: ``import rankwise.compat.horovod as hvd`` in place of ``horovod.torch``.

The public names of ``horovod.torch`` 0.28. Operations are matched between ranks by their names, as in Horovod, and are
carried out when ranks wait: in ``synchronize``, in any call that is not ``_async``, in ``barrier``, ``join``, ``poll``.
"""

import sys

from rankwise.compat.horovod import elastic
from rankwise.compat.horovod.alias import provide
from rankwise.compat.horovod.api import barrier, join, poll, synchronize
from rankwise.compat.horovod.collectives import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from rankwise.compat.horovod.compression import Compression, Compressor, FP16Compressor, NoneCompressor
from rankwise.compat.horovod.distributed_optimizer import DistributedOptimizer
from rankwise.compat.horovod.exceptions import HorovodInternalError, NotOffered
from rankwise.compat.horovod.extensions import check_extension
from rankwise.compat.horovod.initialization import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from rankwise.compat.horovod.launching import run
from rankwise.compat.horovod.objects_and_state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from rankwise.compat.horovod.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
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
from rankwise.compat.horovod.request import Adasum, Average, Max, Min, Product, Sum
from rankwise.compat.horovod.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "FP16Compressor",
    "HorovodInternalError",
    "Max",
    "Min",
    "NoneCompressor",
    "NotOffered",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
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
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "check_extension",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "provide",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

_PARTS = ("functions", "mpi_ops")
"""Modules of ``horovod.torch`` that scripts use as attributes: ``hvd.mpi_ops.Sum``."""
_NOT_OFFERED = {
    "horovodrun": "run `rankwise horovodrun -np 4 python train.py`, or `rankwise run -n 4 train.py`",
    "BroadcastGlobalVariablesHook": "that is TensorFlow's; use hvd.broadcast_parameters()",
    "DistributedGradientTape": "that is TensorFlow's; use hvd.DistributedOptimizer()",
    "DistributedTrainer": "that is MXNet's; use hvd.DistributedOptimizer()",
    "PartialDistributedOptimizer": "that is TensorFlow's; give hvd.DistributedOptimizer() only some parameters",
    "callbacks": "those are Keras's; average what you log with hvd.allreduce()",
    "mpi_lib": "rankwise has no such object; use the functions of this module",
    "mpi_lib_v2": "rankwise has no such object; use the functions of this module",
}


def __getattr__(name: str) -> object:
    """Return this module for the modules that Horovod divides it into; for other names, raise an error."""
    if name in _PARTS:
        return sys.modules[__name__]
    if name in _NOT_OFFERED:
        raise NotOffered(f"rankwise.compat.horovod does not offer {name!r}.", do=_NOT_OFFERED[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
