# SPDX-License-Identifier: Apache-2.0
"""``allreduce`` in all its forms: the sum, average, minimum, maximum, product or Adasum over ranks."""

# ruff: noqa: PLR0917 - the order of the arguments is Horovod's, and scripts pass them by it

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from rankwise.compat.horovod.api import check, check_group, only, submit, synchronize, with_gradients
from rankwise.compat.horovod.compression import Compression, Compressor, compressed_all
from rankwise.compat.horovod.exceptions import HorovodInternalError, NotOffered
from rankwise.compat.horovod.process_sets import ProcessSet, global_process_set
from rankwise.compat.horovod.queue import current_queue
from rankwise.compat.horovod.request import Adasum, Average, Sum, chosen_op, known_op
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


class Reduction(NamedTuple):
    """How the tensors of a process set are combined."""

    op: int
    prescale_factor: float
    postscale_factor: float
    process_set: ProcessSet


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,  # noqa: FBT001 - Horovod's argument
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combine the tensors of all ranks, with gradients.

    Called by: every rank of the process set, with the same name, shape and dtype; other names may come in any order.

    The gradient of a rank's tensor is the same combination of the gradients of all ranks' results.

    Args:
        tensor: any shape; int32, int64 or a float. It is not changed.
        average: deprecated; use ``op``.
        name: matches the calls of the ranks; unnamed calls are matched by their number.
        compression: converts the tensor before it is sent, and the result back.
        op: ``Average`` (the default), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``. Averages of integers are
            truncated towards zero.
        prescale_factor: each rank's tensor is multiplied by it first.
        postscale_factor: the result is multiplied by it.
        process_set: the ranks that take part.

    Returns:
        A new tensor of the same shape and dtype, equal on every rank.

    Raises:
        ConfigurationError: a bad argument; or an operation of this name is pending.
        NotOffered: Adasum of a process set, or of a number of ranks that is not a power of two.
        HorovodInternalError: the ranks passed different arguments under this name, or all wait for each other.
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """
    compressed, context = compression.compress(tensor)
    reduction = Reduction(chosen_op(op, average), prescale_factor, postscale_factor, process_set)
    return compression.decompress(_reduced([compressed], "allreduce", name, reduction)[0], context)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,  # noqa: FBT001 - Horovod's argument
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`allreduce`, without gradients; return a handle for ``poll`` and ``synchronize``."""
    reduction = Reduction(chosen_op(op, average), prescale_factor, postscale_factor, process_set)
    return begin_reduction([tensor], "allreduce", name, reduction, only)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,  # noqa: FBT001 - Horovod's argument
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Do :func:`allreduce` in place, without gradients; return the tensor."""
    reduction = Reduction(chosen_op(op, average), prescale_factor, postscale_factor, process_set)
    return synchronize(allreduce_async_(tensor, None, name, *reduction))  # type: ignore[no-any-return]


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,  # noqa: FBT001 - Horovod's argument
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`allreduce_`; return a handle for ``poll`` and ``synchronize``."""
    reduction = Reduction(chosen_op(op, average), prescale_factor, postscale_factor, process_set)
    return begin_reduction([tensor], "allreduce", name, reduction, lambda _: tensor, is_in_place=True)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,  # noqa: FBT001 - Horovod's argument
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Do :func:`allreduce` with several tensors, all or none, under one name; with gradients."""
    compressed, contexts = compressed_all(check_group(tensors, "grouped_allreduce"), compression)
    reduction = Reduction(chosen_op(op, average), prescale_factor, postscale_factor, process_set)
    reduced = _reduced(compressed, "grouped_allreduce", name, reduction)
    return [compression.decompress(one, context) for one, context in zip(reduced, contexts, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,  # noqa: FBT001 - Horovod's argument
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`grouped_allreduce`, without gradients; return one handle for all."""
    given = check_group(tensors, "grouped_allreduce")
    reduction = Reduction(chosen_op(op, average), prescale_factor, postscale_factor, process_set)
    return begin_reduction(given, "grouped_allreduce", name, reduction)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,  # noqa: FBT001 - Horovod's argument
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Do :func:`grouped_allreduce` in place, without gradients; return the tensors."""
    reduction = Reduction(chosen_op(op, average), prescale_factor, postscale_factor, process_set)
    return synchronize(grouped_allreduce_async_(tensors, None, name, *reduction))  # type: ignore[no-any-return]


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,  # noqa: FBT001 - Horovod's argument
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`grouped_allreduce_`; return one handle for all."""
    given = tuple(check_group(tensors, "grouped_allreduce_"))
    reduction = Reduction(chosen_op(op, average), prescale_factor, postscale_factor, process_set)
    return begin_reduction(given, "grouped_allreduce", name, reduction, lambda _: given, is_in_place=True)


def _reduced(
    tensors: Sequence[torch.Tensor], prefix: str, name: str | None, reduction: Reduction
) -> Sequence[torch.Tensor]:
    return with_gradients(
        tensors,
        there=lambda given: synchronize(begin_reduction(given, prefix, name, reduction)),
        back=lambda gradients, _: _reduced(gradients, prefix, None, reduction),
    )


def begin_reduction(
    tensors: Sequence[torch.Tensor],
    prefix: str,
    name: str | None,
    reduction: Reduction,
    make_result: Callable[[list[torch.Tensor]], Any] = tuple,
    *,
    is_in_place: bool = False,
    is_scattered: bool = False,
) -> int:
    """Start an allreduce or, if ``is_scattered``, a reducescatter; return its handle. Arguments as for ``submit``."""
    op, prescale, postscale, process_set = reduction
    kind = "reducescatter" if is_scattered else "adasum" if op == Adasum else "allreduce"
    check(tensors, kind, prefix)
    if is_scattered and known_op(op) not in (Average, Sum):
        raise HorovodInternalError(
            f"{prefix} does not support {known_op(op).name.title()}.", do="use hvd.Average or hvd.Sum"
        )
    if kind == "adasum":
        _check_adasum(tensors, process_set)
    fields: dict[str, Any] = {"op": int(op), "prescale": float(prescale), "postscale": float(postscale)}
    return submit(kind, tensors, prefix, name, process_set, make_result=make_result, is_in_place=is_in_place, **fields)


def _check_adasum(tensors: Sequence[torch.Tensor], process_set: ProcessSet) -> None:
    if process_set.process_set_id != global_process_set.process_set_id:
        raise NotOffered("Adasum combines all ranks, not a process set.", do="leave out process_set=, or use Average")
    size = current_queue().session.world.world_size
    if size & (size - 1):
        raise NotOffered(
            "Adasum needs a number of ranks that is a power of two.",
            evidence=f"there are {size}",
            do="start 1, 2, 4, 8, ... ranks",
        )
    for tensor in tensors:
        if not tensor.dtype.is_floating_point:
            raise ConfigurationError(f"Adasum does not take {tensor.dtype}.", do="convert the tensor to a float")
