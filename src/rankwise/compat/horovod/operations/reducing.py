# SPDX-License-Identifier: Apache-2.0
"""``allreduce`` and its kin: the sum, average, minimum, maximum, product or Adasum over ranks."""

# ruff: noqa: PLR0917 - the order of the arguments is Horovod's, and scripts pass them by it

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.compat.horovod.compression import Compression, Compressor
from rankwise.compat.horovod.errors import NotOffered
from rankwise.compat.horovod.negotiation.queue import current_queue
from rankwise.compat.horovod.operations.api import ADDED_UP, check, check_group, only, submit, synchronize
from rankwise.compat.horovod.process_sets import ProcessSet, global_process_set
from rankwise.compat.horovod.reduce_ops import Adasum, ReduceOp, chosen_op
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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

    Called by: every rank of the process set, with the same name, shape and dtype; in any order towards other names.

    The gradient of a rank's tensor is the same combination of the gradients of all ranks' results.

    Args:
        tensor: any shape; int32, int64 or a float. It is not changed.
        average: deprecated; use ``op``.
        name: what the ranks' calls are matched by; without one, by how many came before.
        compression: what the tensor becomes on its way.
        op: ``Average`` (also when left out), ``Sum``, ``Adasum``, ``Min``, ``Max`` or ``Product``. Averages of
            integers are cut towards zero.
        prescale_factor: each rank's tensor is multiplied with it before.
        postscale_factor: the result is multiplied with it.
        process_set: the ranks that take part.

    Returns:
        A new tensor of the same shape and dtype, equal on every rank.

    Raises:
        ConfigurationError: a bad argument; or an operation of this name is pending.
        NotOffered: Adasum of a process set, or of a number of ranks that is no power of two.
        HorovodInternalError: the ranks asked for different things under its name, or all wait for each other.
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """
    compressed, context = compression.compress(tensor)
    arguments = (name, chosen_op(op, average), prescale_factor, postscale_factor, process_set)
    if not (isinstance(compressed, torch.Tensor) and compressed.requires_grad):
        # torch's machinery for gradients would take a tenth of the time of a small one.
        return compression.decompress(synchronize(allreduce_async(compressed, None, *arguments)), context)
    reduced: torch.Tensor = _Allreduce.apply(compressed, *arguments)  # pyright: ignore[reportAssignmentType]
    return compression.decompress(reduced, context)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,  # noqa: FBT001 - Horovod's argument
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin what :func:`allreduce` does, without gradients; return a handle for ``poll`` and ``synchronize``."""
    reduction = (chosen_op(op, average), prescale_factor, postscale_factor)
    return _begin([tensor], name, *reduction, process_set, only, prefix="allreduce")


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,  # noqa: FBT001 - Horovod's argument
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Do what :func:`allreduce` does, in place and without gradients; return the tensor."""
    reduction = (chosen_op(op, average), prescale_factor, postscale_factor, process_set)
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
    """Begin what :func:`allreduce_` does; return a handle for ``poll`` and ``synchronize``."""
    reduction = (chosen_op(op, average), prescale_factor, postscale_factor)
    return _begin([tensor], name, *reduction, process_set, lambda _: tensor, prefix="allreduce", is_in_place=True)


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
    """Do what :func:`allreduce` does with several tensors, all or none, under one name; with gradients."""
    tensors = check_group(tensors, "grouped_allreduce")
    compressed, contexts = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    arguments = (name, chosen_op(op, average), prescale_factor, postscale_factor, process_set)
    reduced: tuple[torch.Tensor, ...] = _GroupedAllreduce.apply(*arguments, *compressed)  # pyright: ignore[reportAssignmentType]
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
    """Begin what :func:`grouped_allreduce` does, without gradients; return one handle for all."""
    tensors = check_group(tensors, "grouped_allreduce")
    reduction = (chosen_op(op, average), prescale_factor, postscale_factor)
    return _begin(tensors, name, *reduction, process_set, tuple, prefix="grouped_allreduce")


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,  # noqa: FBT001 - Horovod's argument
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Do what :func:`grouped_allreduce` does, in place and without gradients; return the tensors."""
    reduction = (chosen_op(op, average), prescale_factor, postscale_factor, process_set)
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
    """Begin what :func:`grouped_allreduce_` does; return one handle for all."""
    tensors = check_group(tensors, "grouped_allreduce_")
    reduction = (chosen_op(op, average), prescale_factor, postscale_factor)
    given = tuple(tensors)
    return _begin(given, name, *reduction, process_set, lambda _: given, prefix="grouped_allreduce", is_in_place=True)


def _begin(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    take: Callable[[list[torch.Tensor]], Any],
    *,
    prefix: str,
    is_in_place: bool = False,
) -> int:
    for tensor in tensors:
        check(tensor, prefix, ADDED_UP)
    if op == Adasum:
        _check_adasum(tensors, process_set)
    return submit(
        "adasum" if op == Adasum else "allreduce",
        tensors,
        name,
        process_set,
        take,
        prefix=prefix,
        is_in_place=is_in_place,
        op=int(op),
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
    )


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


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:  # noqa: ANN401 - torch's
        ctx.arguments = arguments[1:]
        name, op, prescale, postscale, process_set = arguments
        return synchronize(allreduce_async(tensor, None, name, op, prescale, postscale, process_set))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # noqa: ANN401 - torch's
        op, prescale, postscale, process_set = ctx.arguments
        gradient = grad_outputs[0].contiguous()
        reduced = allreduce(
            gradient, op=op, prescale_factor=prescale, postscale_factor=postscale, process_set=process_set
        )
        return reduced, None, None, None, None, None


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:  # noqa: ANN401 - torch's
        name, op, prescale, postscale, process_set, *tensors = arguments
        ctx.arguments = (op, prescale, postscale, process_set)
        return synchronize(grouped_allreduce_async(tensors, None, name, op, prescale, postscale, process_set))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # noqa: ANN401 - torch's
        op, prescale, postscale, process_set = ctx.arguments
        gradients = [gradient.contiguous() for gradient in grad_outputs]
        reduced = grouped_allreduce(
            gradients, op=op, prescale_factor=prescale, postscale_factor=postscale, process_set=process_set
        )
        return (None, None, None, None, None, *reduced)
