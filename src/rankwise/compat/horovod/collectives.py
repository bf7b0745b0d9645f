# SPDX-License-Identifier: Apache-2.0
"""``allgather``, ``broadcast``, ``alltoall``, ``reducescatter`` and the sparse ``allreduce``, in all their forms.

Their gradients are built on :func:`rankwise.compat.horovod.reducing.allreduce`.
"""

# ruff: noqa: PLR0917 - the order of the arguments is Horovod's, and scripts pass them by it

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.compat.horovod.api import check, check_group, only, submit, synchronize, with_gradients
from rankwise.compat.horovod.compression import Compression, Compressor, compressed_all
from rankwise.compat.horovod.exceptions import Refused
from rankwise.compat.horovod.process_sets import ProcessSet, global_process_set, members_of
from rankwise.compat.horovod.queue import current_queue
from rankwise.compat.horovod.reducing import Reduction, allreduce, begin_reduction, grouped_allreduce
from rankwise.compat.horovod.request import Average, Sum
from rankwise.errors import ConfigurationError, fold_ranks
from rankwise.torch_private.tensors import sparse_indices, sparse_values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


# -- allgather -----------------------------------------------------------------------------------------


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the rows of all ranks' tensors, with gradients.

    Called by: every rank of the process set, with the same name and dtype; other names may come in any order.

    The gradient of a rank's rows is the average, not the sum, of the gradients of these rows in all ranks' results.

    Args:
        tensor: [rows, ...]; the number of rows may differ between ranks.
        name: matches the calls of the ranks; unnamed calls are matched by their number.
        process_set: the ranks that take part.

    Returns:
        [all rows, ...], in rank order.

    Raises:
        ConfigurationError: a bad argument; or an operation of this name is pending.
        HorovodInternalError: the ranks passed different arguments under this name, or all wait for each other.
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """
    return _gathered([tensor], "allgather", name, process_set)[0]


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start :func:`allgather`, without gradients; return a handle for ``poll`` and ``synchronize``."""
    return _begin_gather([tensor], "allgather", name, process_set, only)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Do :func:`allgather` with several tensors, all or none, under one name; with gradients."""
    given = check_group(tensors, "grouped_allgather")
    return tuple(_gathered(given, "grouped_allgather", name, process_set))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`grouped_allgather`, without gradients; return one handle for all."""
    return _begin_gather(check_group(tensors, "grouped_allgather"), "grouped_allgather", name, process_set)


def _gathered(
    tensors: Sequence[torch.Tensor], prefix: str, name: str | None, process_set: ProcessSet
) -> Sequence[torch.Tensor]:
    def back(gradients: list[torch.Tensor], shapes: list[torch.Size]) -> list[torch.Tensor]:
        num_rows = [shape[0] for shape in shapes]
        reduced = grouped_allreduce(gradients, op=Average, process_set=process_set)
        rows_of_rank = allgather(torch.tensor([num_rows]), process_set=process_set)
        starts = rows_of_rank[: process_set.rank()].sum(dim=0).tolist()
        return [gradient.narrow(0, *part) for gradient, *part in zip(reduced, starts, num_rows, strict=True)]

    return with_gradients(
        tensors, there=lambda given: synchronize(_begin_gather(given, prefix, name, process_set)), back=back
    )


def _begin_gather(
    tensors: Sequence[torch.Tensor],
    prefix: str,
    name: str | None,
    process_set: ProcessSet,
    make_result: Callable[[list[torch.Tensor]], Any] = tuple,
) -> int:
    check(tensors, "allgather", prefix)
    return submit("allgather", tensors, prefix, name, process_set, make_result=make_result)


# -- broadcast -----------------------------------------------------------------------------------------


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Give every rank the tensor of ``root_rank``, with gradients.

    Called by: every rank of the process set, with the same name, shape and dtype; other names may come in any order.

    The gradient of the root's tensor is the average of the gradients of all ranks' results; other ranks' is zero.

    Args:
        tensor: any shape; on other ranks than the root only its shape and dtype are used. It is not changed.
        root_rank: its number in the world, also with a process set.
        name: matches the calls of the ranks; unnamed calls are matched by their number.
        process_set: the ranks that take part.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        ConfigurationError: a bad argument; or an operation of this name is pending.
        HorovodInternalError: the ranks passed different arguments under this name, or all wait for each other.
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """

    def back(gradients: list[torch.Tensor], _: object) -> list[torch.Tensor]:
        gradient = allreduce(gradients[0], op=Average, process_set=process_set)
        is_root = current_queue().session.world.rank == root_rank
        return [gradient if is_root else torch.zeros_like(gradient)]

    return with_gradients(
        [tensor], there=lambda _: (synchronize(broadcast_async(tensor, root_rank, name, process_set)),), back=back
    )[0]


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`broadcast`, without gradients; return a handle for ``poll`` and ``synchronize``."""
    return _begin_broadcast(tensor, root_rank, name, process_set, only)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Do :func:`broadcast` in place, without gradients; return the tensor."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))  # type: ignore[no-any-return]


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`broadcast_`; return a handle for ``poll`` and ``synchronize``."""
    return _begin_broadcast(tensor, root_rank, name, process_set, lambda _: tensor, is_in_place=True)


def _begin_broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    make_result: Callable[[list[torch.Tensor]], Any],
    *,
    is_in_place: bool = False,
) -> int:
    check([tensor], "broadcast", "broadcast")
    ranks = current_queue().members[members_of(process_set)].ranks
    if root_rank not in ranks:
        raise Refused(
            f"broadcast got root_rank={root_rank}, which is not one of its ranks.",
            evidence=f"it is among {fold_ranks(ranks)}",
            do="pass one of them as root_rank=, by its rank in the world",
        )
    root = int(root_rank)
    return submit(
        "broadcast",
        [tensor],
        "broadcast",
        name,
        process_set,
        make_result=make_result,
        is_in_place=is_in_place,
        root=root,
    )


# -- alltoall ------------------------------------------------------------------------------------------


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send some of the rows to each rank, and receive rows from each, with gradients.

    Called by: every rank of the process set, with the same name and dtype; other names may come in any order.

    Gradients are sent back to the rank that the rows came from.

    Args:
        tensor: [rows, ...]; the number of rows may differ between ranks.
        splits: [ranks of the process set], the number of rows for each rank, int32; equal parts by default. Rows
            beyond their sum are not sent.
        name: matches the calls of the ranks; unnamed calls are matched by their number.
        process_set: the ranks that take part.

    Returns:
        [received rows, ...], in the order of the ranks that sent them; where ``splits`` was given, also the number of
        rows from each, as int32 [ranks].

    Raises:
        ConfigurationError: a bad argument; or an operation of this name is pending.
        HorovodInternalError: the ranks passed different arguments under this name, or all wait for each other.
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """
    received = torch.empty(0)

    def there(given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        nonlocal received
        rows, received = synchronize(alltoall_async(given[0], splits, name, process_set))
        return (rows,)

    def back(gradients: list[torch.Tensor], shapes: list[torch.Size]) -> list[torch.Tensor]:
        rows, _ = alltoall(gradients[0], splits=received, process_set=process_set)
        # Rows that were not sent have no part in any result.
        return [torch.cat([rows, rows.new_zeros(shapes[0][0] - rows.shape[0], *rows.shape[1:])])]

    (rows,) = with_gradients([tensor], there=there, back=back)
    return rows if splits is None else (rows, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`alltoall`, without gradients; return a handle.

    ``synchronize`` returns the rows and the number of rows from each rank, also without ``splits``.
    """
    check([tensor], "alltoall", "alltoall")
    counts = _counts(tensor, splits, process_set)
    device = splits.device if isinstance(splits, torch.Tensor) else torch.device("cpu")

    def make_result(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        rows, received = tensors
        return rows, received.to(device)

    return submit("alltoall", [tensor], "alltoall", name, process_set, make_result=make_result, splits=counts)


def _counts(tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, process_set: ProcessSet) -> list[int]:
    """Return the number of rows for each rank of the process set."""
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


# -- reducescatter -------------------------------------------------------------------------------------


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combine the tensors of all ranks, and keep this rank's share of the rows; with gradients.

    Called by: every rank of the process set, with the same name, shape and dtype; other names may come in any order.

    The gradient is the concatenation of the gradients of all ranks' shares, times the number of ranks if ``op`` is
    ``Sum``, times both factors.

    Args:
        tensor: [rows, ...]; int32, int64 or a float. It is not changed.
        name: matches the calls of the ranks; unnamed calls are matched by their number.
        compression: converts the tensor before it is sent, and the result back.
        op: ``Average`` or ``Sum``.
        process_set: the ranks that take part.
        prescale_factor: each rank's tensor is multiplied by it first.
        postscale_factor: the result is multiplied by it.

    Returns:
        [this rank's rows, ...]: divided as evenly as possible, the first ranks with one row more.

    Raises:
        ConfigurationError: a bad argument; or an operation of this name is pending.
        HorovodInternalError: another op; or the ranks passed different arguments under this name, or all wait for
            each other.
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """
    compressed, context = compression.compress(tensor)
    reduction = Reduction(op, prescale_factor, postscale_factor, process_set)
    return compression.decompress(_scattered([compressed], "reducescatter", name, reduction)[0], context)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start :func:`reducescatter`, without gradients; return a handle for ``poll`` and ``synchronize``."""
    reduction = Reduction(op, prescale_factor, postscale_factor, process_set)
    return begin_reduction([tensor], "reducescatter", name, reduction, only, is_scattered=True)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Do :func:`reducescatter` with several tensors, all or none, under one name; with gradients."""
    compressed, contexts = compressed_all(check_group(tensors, "grouped_reducescatter"), compression)
    reduction = Reduction(op, prescale_factor, postscale_factor, process_set)
    reduced = _scattered(compressed, "grouped_reducescatter", name, reduction)
    return [compression.decompress(one, context) for one, context in zip(reduced, contexts, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start :func:`grouped_reducescatter`, without gradients; return one handle for all."""
    given = check_group(tensors, "grouped_reducescatter")
    reduction = Reduction(op, prescale_factor, postscale_factor, process_set)
    return begin_reduction(given, "grouped_reducescatter", name, reduction, is_scattered=True)


def _scattered(
    tensors: Sequence[torch.Tensor], prefix: str, name: str | None, reduction: Reduction
) -> Sequence[torch.Tensor]:
    op, prescale, postscale, process_set = reduction

    def there(given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return synchronize(begin_reduction(given, prefix, name, reduction, is_scattered=True))  # type: ignore[no-any-return]

    def back(gradients: list[torch.Tensor], _: object) -> Sequence[torch.Tensor]:
        num_added = process_set.size() or 1 if op == Sum else 1
        scaled = [gradient * (num_added * prescale * postscale) for gradient in gradients]
        return grouped_allgather(scaled, process_set=process_set)

    return with_gradients(tensors, there=there, back=back)


# -- sparse allreduce ----------------------------------------------------------------------------------


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start the sum or average of sparse tensors.

    Called by: every rank of the process set, with the same name and shape; other names may come in any order. The
    number of entries may differ between ranks.

    Args:
        tensor: of torch's sparse layout. It is not changed.
        name: matches the calls of the ranks.
        op: ``Average``; anything else means the sum.
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
