# SPDX-License-Identifier: Apache-2.0
"""Sums and other reductions of tensors of several ranks, in rank order: values in, values out.

Half-precision numbers are summed in float32 and rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_IN_FLOAT32 = (torch.bfloat16, torch.float16)
_PIECE_ELEMENTS = 2**18
_REAL = (torch.float64, torch.float32, *_IN_FLOAT32, torch.int64, torch.int32, torch.int8, torch.uint8)
_COMPLEX = (torch.complex64, torch.complex128)
_STEPS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


REDUCIBLE = {op: frozenset({*_REAL, torch.bool, *(_COMPLEX if op == "sum" else ())}) for op in _STEPS}
"""By operation, the dtypes that every exchange can reduce: a limit of Gloo must not show up only on several hosts."""


def reduce_into(out: torch.Tensor, parts: Sequence[torch.Tensor], op: str) -> None:
    """Reduce ``parts`` into ``out``; all of one shape [n] and dtype. ``out`` is not one of them, except the first."""
    step = _STEPS[op]
    if out.dtype not in _IN_FLOAT32:
        step(parts[0], parts[1], out=out) if len(parts) > 1 else out.copy_(parts[0])
        for part in parts[2:]:
            step(out, part, out=out)
        return
    for piece in _pieces(out, parts):
        total = piece[1].float()
        for part in piece[2:]:
            step(total, part, out=total)
        piece[0].copy_(total)


def weighted_sum_into(out: torch.Tensor, parts: Sequence[torch.Tensor], factors: Sequence[float]) -> None:
    """Write sum_r factors[r] * parts[r] into ``out``. A part with factor 0 has no effect, not even a NaN.

    ``out`` is not one of the parts.
    """
    if 0.0 in factors:
        parts = [part for part, factor in zip(parts, factors, strict=True) if factor]
        factors = [factor for factor in factors if factor]
    if not parts:
        out.zero_()
        return
    if out.dtype not in _IN_FLOAT32:
        _weighted_sum(out, parts, factors)
        return
    for piece in _pieces(out, parts):
        wide = [part.float() for part in piece[1:]]
        _weighted_sum(wide[0], wide, factors)
        piece[0].copy_(wide[0])


def add_own(out: torch.Tensor, parts: Sequence[torch.Tensor], own: torch.Tensor, factor: float) -> None:
    """Write the sum of ``parts``, at least one, and ``factor * own`` into ``out``, in one pass for one part."""
    torch.add(parts[0], own, alpha=factor, out=out)
    for part in parts[1:]:
        out.add_(part)


def _weighted_sum(out: torch.Tensor, parts: Sequence[torch.Tensor], factors: Sequence[float]) -> None:
    first = factors[0]
    if factors.count(first) == len(factors):
        if len(parts) > 1:
            torch.add(parts[0], parts[1], out=out)
            for part in parts[2:]:
                out.add_(part)
            if first != 1.0:
                out.mul_(first)
        else:
            torch.mul(parts[0], first, out=out)
        return
    torch.mul(parts[0], first, out=out)
    for part, factor in zip(parts[1:], factors[1:], strict=True):
        out.add_(part, alpha=factor)


def _pieces(out: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(out.split(_PIECE_ELEMENTS), *(part.split(_PIECE_ELEMENTS) for part in parts), strict=True))
