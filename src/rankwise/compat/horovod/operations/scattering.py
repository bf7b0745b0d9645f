# SPDX-License-Identifier: Apache-2.0
"""``reducescatter`` and its kin: the sum or average over ranks, each rank keeping some of its rows."""

# ruff: noqa: PLR0917 - the order of the arguments is Horovod's, and scripts pass them by it

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.compat.horovod.compression import Compression, Compressor
from rankwise.compat.horovod.errors import HorovodInternalError
from rankwise.compat.horovod.operations.api import ADDED_UP, check, check_group, only, submit, synchronize
from rankwise.compat.horovod.operations.gathering import grouped_allgather
from rankwise.compat.horovod.process_sets import ProcessSet, global_process_set
from rankwise.compat.horovod.reduce_ops import Average, Sum, known_op

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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

    Called by: every rank of the process set, with the same name, shape and dtype; in any order towards other names.

    The gradient is the gradients of all ranks' shares put together, times the number of ranks where ``op`` is
    ``Sum``, times both factors.

    Args:
        tensor: [rows, ...]; int32, int64 or a float. It is not changed.
        name: what the ranks' calls are matched by; without one, by how many came before.
        compression: what the tensor becomes on its way.
        op: ``Average`` or ``Sum``.
        process_set: the ranks that take part.
        prescale_factor: each rank's tensor is multiplied with it before.
        postscale_factor: the result is multiplied with it.

    Returns:
        [this rank's rows, ...]: as evenly as it goes, the first ranks one row more.

    Raises:
        ConfigurationError: a bad argument; or an operation of this name is pending.
        HorovodInternalError: another op; or the ranks asked for different things under its name, or all wait for
            each other.
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """
    compressed, context = compression.compress(tensor)
    arguments = (name, op, process_set, prescale_factor, postscale_factor)
    reduced: tuple[torch.Tensor, ...] = _Reducescatter.apply(*arguments, False, compressed)  # pyright: ignore[reportAssignmentType]
    return compression.decompress(reduced[0], context)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin what :func:`reducescatter` does, without gradients; return a handle for ``poll`` and ``synchronize``."""
    return _begin([tensor], name, op, process_set, (prescale_factor, postscale_factor), only, prefix="reducescatter")


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Do what :func:`reducescatter` does with several tensors, all or none, under one name; with gradients."""
    tensors = check_group(tensors, "grouped_reducescatter")
    compressed, contexts = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    arguments = (name, op, process_set, prescale_factor, postscale_factor)
    reduced: tuple[torch.Tensor, ...] = _Reducescatter.apply(*arguments, True, *compressed)  # pyright: ignore[reportAssignmentType]
    return [compression.decompress(one, context) for one, context in zip(reduced, contexts, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin what :func:`grouped_reducescatter` does, without gradients; return one handle for all."""
    tensors = check_group(tensors, "grouped_reducescatter")
    factors = (prescale_factor, postscale_factor)
    return _begin(tensors, name, op, process_set, factors, tuple, prefix="grouped_reducescatter")


def _begin(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    factors: tuple[float, float],
    take: Callable[[list[torch.Tensor]], Any],
    *,
    prefix: str,
) -> int:
    for tensor in tensors:
        check(tensor, prefix, ADDED_UP, needs_rows=True)
    if known_op(op) not in (Average, Sum):
        raise HorovodInternalError(f"{prefix} knows no {known_op(op).name.title()}.", do="use hvd.Average or hvd.Sum")
    prescale, postscale = factors
    return submit(
        "reducescatter",
        tensors,
        name,
        process_set,
        take,
        prefix=prefix,
        op=int(op),
        prescale=float(prescale),
        postscale=float(postscale),
    )


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:  # noqa: ANN401 - torch's
        name, op, process_set, prescale, postscale, is_grouped, *tensors = arguments
        ctx.process_set = process_set
        ctx.factor = (process_set.size() if op == Sum else 1) * prescale * postscale
        if is_grouped:
            return synchronize(grouped_reducescatter_async(tensors, name, op, process_set, prescale, postscale))  # type: ignore[no-any-return]
        return (synchronize(reducescatter_async(tensors[0], name, op, process_set, prescale, postscale)),)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # noqa: ANN401 - torch's
        gradients = [(gradient * ctx.factor).contiguous() for gradient in grad_outputs]
        return (None, None, None, None, None, None, *grouped_allgather(gradients, process_set=ctx.process_set))
