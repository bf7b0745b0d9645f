# SPDX-License-Identifier: Apache-2.0
"""Carries out decided operations by rankwise's collectives: small reductions together; and Adasum's rule.

Every rank of the world calls it with the same requests in the same order; ranks outside a process set omit its own.
"""

from __future__ import annotations

import math
import sys
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
import torch

from rankwise.comm.backends.protocol import NOTE_BYTES
from rankwise.comm.collectives import all_gather, all_gather_uneven, all_to_all, broadcast, exchange_of, reduce_scatter
from rankwise.compat.horovod.request import ReduceOp
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.compat.horovod.request import OperationRequest, PendingOperation


FUSED_BYTES = 2**20
"""Reductions of at most this size are done together, in buffers of at most sixteen times this size."""

REPORT_BYTES = 16
"""Of a note, which the report of a rank takes; its input may follow."""
_BYTES_IN_NOTE = {"int32": 4, "int64": 8, "float32": 4, "float64": 8}
"""Of one element, by the dtypes that can follow."""

_NUMPY_DTYPES = {getattr(torch, name): np.dtype(name) for name in _BYTES_IN_NOTE}
_NUMPY_STEPS = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
_NAME_OF_OP = {
    ReduceOp.AVERAGE: "sum",
    ReduceOp.SUM: "sum",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.PRODUCT: "product",
}


def zeros_for(request: OperationRequest, device: torch.device) -> list[torch.Tensor]:
    """Return the input of a rank that has joined."""
    return [
        torch.zeros(shape, dtype=_dtype(name), device=device)
        for name, shape in zip(request.dtypes, request.shapes, strict=True)
    ]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"torch has no dtype {name!r}.", do="use the same version of torch on every rank")
    return dtype


def fits_a_note(requests: Sequence[OperationRequest]) -> bool:
    """Return whether all that is requested is one reduction so small that its input is sent with the report of it."""
    if len(requests) != 1:
        return False
    kind, _, set_id, _, dtypes, shapes, _, _, _, device, _ = requests[0]
    if kind != "allreduce" or set_id != 0 or device != "cpu" or len(shapes) != 1:
        return False
    num_bytes = math.prod(shapes[0]) * _BYTES_IN_NOTE.get(dtypes[0], NOTE_BYTES)
    return 0 < num_bytes <= NOTE_BYTES - REPORT_BYTES


def input_of(work: PendingOperation) -> bytes:
    """Return this rank's input of a reduction that fits a note."""
    return _times(work.tensors[0], work.request.prescale).numpy().tobytes()  # type: ignore[no-any-return]


def reduced_from_notes(work: PendingOperation, notes: Sequence[bytes]) -> torch.Tensor:
    """Return the result of a reduction whose inputs follow the reports of all ranks, in rank order."""
    (tensor,) = work.tensors
    dtype = _NUMPY_DTYPES[tensor.dtype]
    # By NumPy: for so few numbers, torch's calls take longer than the exchange.
    rows = np.frombuffer(b"".join(notes), np.uint8).reshape(len(notes), -1)[:, REPORT_BYTES:]
    parts = rows[:, : tensor.numel() * dtype.itemsize].copy().view(dtype)
    # Row by row: NumPy's own reductions would add up many ranks in another order than torch's exchange.
    reduced = reduce(_NUMPY_STEPS[_NAME_OF_OP[ReduceOp(work.request.op)]], parts)
    result = _rescaled(torch.from_numpy(reduced).view(tensor.shape), work)
    return tensor.copy_(result) if work.is_in_place else result


def carry_out(works: Sequence[PendingOperation]) -> list[list[torch.Tensor]]:
    """Return the results of each operation, one per tensor; of an alltoall also the number of rows from each member.

    Called by: every rank of the world, with the same requests in the same order, for its own process sets only.
    """
    reduced = iter(_reduced_together([work for work in works if work.request.kind == "allreduce"]))
    return [next(reduced) if work.request.kind == "allreduce" else _carried_out(work) for work in works]


def _carried_out(work: PendingOperation) -> list[torch.Tensor]:
    request, group, tensors = work.request, work.members.group, work.tensors
    if request.kind == "alltoall":
        (tensor,) = tensors
        parts = tensor[: sum(work.splits)].split(list(work.splits))
        received = all_to_all([part.contiguous() for part in parts], group=group)
        return [torch.cat(received), torch.tensor([part.shape[0] for part in received], dtype=torch.int32)]
    if request.kind == "allgather":
        return [torch.cat(all_gather_uneven(tensor, group=group)) for tensor in tensors]
    scaled = [_times(tensor, request.prescale) for tensor in tensors]
    if request.kind == "reducescatter":
        return [_rescaled(reduce_scatter(tensor, "sum", group=group), work) for tensor in scaled]
    if request.kind == "adasum":
        results = [_times(adasum(all_gather(tensor, group=group)), request.postscale) for tensor in scaled]
    else:
        results = [broadcast(tensor, request.root, group=group) for tensor in scaled]
    if not work.is_in_place:
        return results
    return [tensor.copy_(result) for tensor, result in zip(tensors, results, strict=True)]


def _reduced_together(works: Sequence[PendingOperation]) -> list[list[torch.Tensor]]:
    """Return the reduced tensors of each operation; small ones of one kind are reduced as one buffer."""
    buffers: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for number, work in enumerate(works):
        request = work.request
        for place, tensor in enumerate(work.tensors):
            kind = (request.set_id, request.op, tensor.dtype, request.prescale, request.postscale, tensor.device)
            alone = tensor.nbytes > FUSED_BYTES
            buffers.setdefault((*kind, (number, place)) if alone else kind, []).append((number, place))
    results: list[list[torch.Tensor]] = [list(work.tensors) for work in works]
    for places in buffers.values():
        for piece in _pieces(places, works):
            work = works[piece[0][0]]
            tensors = [results[number][place] for number, place in piece]
            if len(tensors) == 1 and not work.is_in_place:
                results[piece[0][0]][piece[0][1]] = _reduced(tensors[0], work)
                continue
            flat = tensors[0] if len(tensors) == 1 else torch.cat([tensor.view(-1) for tensor in tensors])
            parts = _reduced(flat, work).view(-1).split([tensor.numel() for tensor in tensors])
            for (number, place), tensor, part in zip(piece, tensors, parts, strict=True):
                # Copied: a view would keep the whole buffer in memory, and in a file that it is saved to.
                target = tensor if works[number].is_in_place else torch.empty_like(tensor)
                results[number][place] = target.copy_(part.view(tensor.shape))
    return results


def _pieces(places: Sequence[tuple[int, int]], works: Sequence[PendingOperation]) -> list[list[tuple[int, int]]]:
    """Return the tensors, by operation and place, cut into buffers of at most sixteen times ``FUSED_BYTES``."""
    pieces: list[list[tuple[int, int]]] = [[]]
    num_bytes = 0
    for number, place in places:
        tensor = works[number].tensors[place]
        num_bytes += tensor.nbytes
        if num_bytes > 16 * FUSED_BYTES and pieces[-1]:
            pieces.append([])
            num_bytes = tensor.nbytes
        pieces[-1].append((number, place))
    return pieces


def _reduced(tensor: torch.Tensor, work: PendingOperation) -> torch.Tensor:
    """Return the reduction, a new tensor. The ranks have compared their requests already, and do not do so again."""
    request = work.request
    name = _NAME_OF_OP[ReduceOp(request.op)]
    scaled = _times(tensor, request.prescale)
    exchange = exchange_of(work.members.group)
    what = f'allreduce("{name}", {request.dtypes[0]}[{tensor.numel()}])'
    result = scaled.clone() if exchange is None else exchange.all_reduce(scaled, name, what=what)
    return _rescaled(result, work)


def _rescaled(result: torch.Tensor, work: PendingOperation) -> torch.Tensor:
    """Return a sum times the postscale factor, divided by the number of ranks for an average."""
    scaled, size = _times(result, work.request.postscale), len(work.members.ranks)
    if work.request.op != ReduceOp.AVERAGE or size == 1:
        return scaled
    return scaled.div_(size) if scaled.dtype.is_floating_point else scaled.div_(size, rounding_mode="trunc")


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the product in the dtype of ``tensor``; integers are truncated towards zero."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_floating_point:
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)


# Below this the quotient has no precision left; the tensor is practically zero and is not counted.
_SMALLEST_SQUARE = sys.float_info.min**0.5
# torch adds up more numbers than this with several threads: the last bits would depend on how many a rank has.
_SUMMED_AT_ONCE = 4096


def adasum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Combine the tensors of all ranks, neighbours first, then pairs of pairs.

    Args:
        values: one per rank in rank order, of one shape and dtype; their number is a power of two.

    Returns:
        A new tensor of the same shape and dtype. Computed in float64 and rounded once.

    Source: arXiv:2006.02924, the pairwise rule and its recursion.
    """
    level = [value.double() for value in values]
    while len(level) > 1:
        level = [_pair(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0].to(values[0].dtype, copy=True)


def _pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b."""
    common = _sum(a * b)
    return _share(a, common) * a + _share(b, common) * b


def _share(tensor: torch.Tensor, common: float) -> float:
    square = _sum(tensor.square())
    return 1.0 - 0.5 * common / square if square >= _SMALLEST_SQUARE else 1.0


def _sum(numbers: torch.Tensor) -> float:
    """Return the sum, the same bits for any number of threads."""
    flat = numbers.flatten()
    while flat.numel() > _SUMMED_AT_ONCE:
        num_rows, rest = divmod(flat.numel(), _SUMMED_AT_ONCE)
        rows = flat[: num_rows * _SUMMED_AT_ONCE].view(num_rows, _SUMMED_AT_ONCE).sum(dim=1)
        flat = torch.cat([rows, flat[flat.numel() - rest :].sum().view(1)])
    return float(flat.sum())
