# SPDX-License-Identifier: Apache-2.0
"""Carrying out what a round has decided: the requests' tensors travel, small reductions together; Adasum's rule.

Every rank of the world calls with the same requests in the same order; those outside a process set pass over its own.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rankwise.comm.collectives import all_gather, all_gather_uneven, all_to_all, broadcast, exchange_of, reduce_scatter
from rankwise.compat.horovod.reduce_ops import ReduceOp
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.collectives import Group
    from rankwise.compat.horovod.negotiation.request import OperationRequest


FUSED_BYTES = 2**20
"""Reductions of at most this size travel together, in buffers of at most sixteen times as much."""

_NAME_OF_OP = {
    ReduceOp.AVERAGE: "sum",
    ReduceOp.SUM: "sum",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.PRODUCT: "product",
}


@dataclass(kw_only=True)
class ReadyOperation:
    """One request, and what this rank gives to it."""

    request: OperationRequest
    group: Group | None
    """The members, ``None`` for the world."""
    size: int
    """How many they are."""
    tensors: Sequence[torch.Tensor]
    """What this rank sends, none with a gradient; zeros where it has joined."""
    is_in_place: bool = False
    """Whether the results are written into ``tensors``."""
    splits: Sequence[int] = ()
    """How many rows of an alltoall go to each member."""


def stand_ins(request: OperationRequest, device: torch.device) -> list[torch.Tensor]:
    """Return what a rank that has joined sends: zeros."""
    return [
        torch.zeros(shape, dtype=dtype_named(dtype), device=device)
        for dtype, shape in zip(request.dtypes, request.shapes, strict=True)
    ]


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a name as requests write it."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"torch has no dtype {name!r}.", do="use the same version of torch on every rank")
    return dtype


def carry_out(works: Sequence[ReadyOperation]) -> list[list[torch.Tensor]]:
    """Return what each work comes to, one tensor per tensor; of an alltoall also the rows received from each member.

    Called by: every rank of the world, with the same requests in the same order; members only pass the works of
    their process sets.
    """
    reduced = iter(_reduced_together([work for work in works if work.request.kind == "allreduce"]))
    return [next(reduced) if work.request.kind == "allreduce" else _carried_out(work) for work in works]


def _carried_out(work: ReadyOperation) -> list[torch.Tensor]:
    kind = work.request.kind
    if kind == "adasum":
        return _placed([_adasum(tensor, work) for tensor in work.tensors], work)
    if kind == "broadcast":
        return _placed([broadcast(tensor, work.request.root, group=work.group) for tensor in work.tensors], work)
    if kind == "allgather":
        return [torch.cat(all_gather_uneven(tensor, group=work.group)) for tensor in work.tensors]
    if kind == "reducescatter":
        return [_reduce_scattered(tensor, work) for tensor in work.tensors]
    if kind == "alltoall":
        (tensor,) = work.tensors
        parts = tensor[: sum(work.splits)].split(list(work.splits))
        received = all_to_all([part.contiguous() for part in parts], group=work.group)
        return [torch.cat(received), torch.tensor([part.shape[0] for part in received], dtype=torch.int32)]
    return []


def _placed(results: list[torch.Tensor], work: ReadyOperation) -> list[torch.Tensor]:
    """Return the results, written into the tensors that were given where the operation is in place."""
    if not work.is_in_place:
        return results
    return [tensor.copy_(result) for tensor, result in zip(work.tensors, results, strict=True)]


def _reduced_together(works: Sequence[ReadyOperation]) -> list[list[torch.Tensor]]:
    """Return the reduced tensors of each work: small ones of one kind as one buffer."""
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
                # Copied: a view would keep, and save, the whole buffer.
                target = tensor if works[number].is_in_place else torch.empty_like(tensor)
                results[number][place] = target.copy_(part.view(tensor.shape))
    return results


def _pieces(places: Sequence[tuple[int, int]], works: Sequence[ReadyOperation]) -> list[list[tuple[int, int]]]:
    """Return the places cut into buffers of at most sixteen times ``FUSED_BYTES``."""
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


def _reduced(tensor: torch.Tensor, work: ReadyOperation) -> torch.Tensor:
    """Return the reduction, a new tensor. The ranks have agreed on it in this round, and need not do so again."""
    request = work.request
    name = _NAME_OF_OP[ReduceOp(request.op)]
    scaled = _times(tensor, request.prescale)
    exchange = exchange_of(work.group)
    what = f'allreduce("{name}", {request.dtypes[0]}[{tensor.numel()}])'
    result = scaled.clone() if exchange is None else exchange.all_reduce(scaled, name, what=what)
    return _scaled(result, work)


def _reduce_scattered(tensor: torch.Tensor, work: ReadyOperation) -> torch.Tensor:
    return _scaled(reduce_scatter(_times(tensor, work.request.prescale), "sum", group=work.group), work)


def _scaled(result: torch.Tensor, work: ReadyOperation) -> torch.Tensor:
    """Return a sum times the factor that comes after it, and divided where it is to be an average."""
    scaled = _times(result, work.request.postscale)
    if work.request.op != ReduceOp.AVERAGE or work.size == 1:
        return scaled
    return torch.div(scaled, work.size, rounding_mode=None if scaled.dtype.is_floating_point else "trunc", out=scaled)


def _adasum(tensor: torch.Tensor, work: ReadyOperation) -> torch.Tensor:
    scaled = _times(tensor, work.request.prescale)
    return _times(adasum(all_gather(scaled, group=work.group)), work.request.postscale)


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the product in the dtype of ``tensor``; that of integers is cut towards zero."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_floating_point:
        return tensor * factor
    return (tensor.double() * factor).to(tensor.dtype)


# Below this the quotient says nothing any more; the tensor is as good as zero and does not count.
_SMALLEST_SQUARE = sys.float_info.min**0.5
# torch adds up more numbers than this by as many threads as there are: the last bits would differ between ranks.
_SUMMED_AT_ONCE = 4096


def adasum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Combine the tensors of all ranks, neighbours first, then pairs of pairs.

    Args:
        values: of each rank in rank order, of one shape and dtype; their number is a power of two.

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
    """Return the sum, the same bits however many threads there are."""
    flat = numbers.flatten()
    while flat.numel() > _SUMMED_AT_ONCE:
        num_rows, rest = divmod(flat.numel(), _SUMMED_AT_ONCE)
        rows = flat[: num_rows * _SUMMED_AT_ONCE].view(num_rows, _SUMMED_AT_ONCE).sum(dim=1)
        flat = torch.cat([rows, flat[flat.numel() - rest :].sum().view(1)])
    return float(flat.sum())
