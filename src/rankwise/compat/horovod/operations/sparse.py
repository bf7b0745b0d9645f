# SPDX-License-Identifier: Apache-2.0
"""The sum or average of sparse tensors: the entries of all ranks, one rank's after the other's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.compat.horovod.operations.api import synchronize
from rankwise.compat.horovod.operations.gathering import allgather_async
from rankwise.compat.horovod.process_sets import ProcessSet, global_process_set
from rankwise.compat.horovod.reduce_ops import Average
from rankwise.errors import ConfigurationError
from rankwise.torch_private.tensors import sparse_indices, sparse_values

if TYPE_CHECKING:
    from collections.abc import Callable


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begin the sum or average of sparse tensors.

    Called by: every rank of the process set, with the same name and shape; in any order towards other names. The
    number of entries may differ between ranks.

    Args:
        tensor: of torch's sparse layout. It is not changed.
        name: what the ranks' calls are matched by.
        op: ``Average``, else the sum.
        process_set: the ranks that take part.

    Returns:
        A function that waits and returns the result, a sparse tensor that is not coalesced: the entries of all ranks.

    Raises:
        ConfigurationError: the tensor is not sparse; or an operation of this name is pending.
    """
    if tensor.layout != torch.sparse_coo:
        raise ConfigurationError(
            f"sparse_allreduce_async does not take {tensor.layout} tensors.", do="use hvd.allreduce_async()"
        )
    of_entries = sparse_indices(tensor).transpose(0, 1).contiguous()
    indices_handle = allgather_async(of_entries, name=f"{name}.indices", process_set=process_set)
    values = sparse_values(tensor).contiguous()
    values_handle = allgather_async(values, name=f"{name}.values", process_set=process_set)
    shape = tensor.shape

    def finish() -> torch.Tensor:
        values = synchronize(values_handle)
        indices = synchronize(indices_handle)
        if op == Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, shape, is_coalesced=False, check_invariants=False)

    return finish
