# SPDX-License-Identifier: Apache-2.0
"""Philox on GPUs, in Triton, whose own function has the bits of NumPy's. Imported only where there is a GPU."""
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
# ruff: noqa: ANN001, ANN202, N803, PLR0917, PLR2004 - kernels have Triton's types, its names of constants, and no others

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton  # type: ignore[import-not-found] # pyright: ignore[reportMissingImports] - optional
import triton.language as tl  # type: ignore[import-not-found] # pyright: ignore[reportMissingImports] - optional

from rankwise.replicate.random_numbers.counter import OTHER, signed

if TYPE_CHECKING:
    from rankwise.replicate.random_numbers.counter import Key

_ROWS = 128
"""Counts of a program: one for each of its threads."""
_NUMBERS = ["key0", "key1", "first", "other", "whole", "more"]
"""Arguments whose values need no kernel of their own."""


@triton.jit
def _drawn(counts, columns, key0, key1):
    """Return a word of each count: that of which ``columns`` has the number."""
    counts = (counts + 1).to(tl.uint64)
    zeros = counts * 0
    a, b, c, d = tl.philox_impl(counts, zeros, zeros, zeros, key0.to(tl.uint64), key1.to(tl.uint64))
    return tl.where(columns < 2, tl.where(columns == 0, a, b), tl.where(columns == 2, c, d))


@triton.jit(do_not_specialize=_NUMBERS)
def _words(out, key0, key1, first, ROWS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, 4)[None, :]
    words = _drawn(first + rows, columns, key0, key1)
    tl.store(out + rows * 4 + columns, words.to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=_NUMBERS)
def _kept(out, key0, key1, other, first, whole, more, ROWS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, 16)[None, :]
    words = _drawn(first + rows, columns // 4, key0, key1)
    leading = (words >> (columns % 4 * 16).to(tl.uint64) & 0xFFFF).to(tl.int32)
    below = leading < whole
    is_equal = leading == whole
    if tl.max(tl.max(is_equal.to(tl.int32), 1), 0) > 0:
        at = (first + rows) * 16 + columns
        words = _drawn(at // 8, at // 2 % 4, other, key1)
        trailing = (words >> (at % 2 * 32).to(tl.uint64) & 0xFFFFFFFF).to(tl.int64)
        below = below | (is_equal & (trailing < more))
    tl.store(out + rows * 16 + columns, below.to(tl.int8))


def words(key: Key, first: int, num: int, device: torch.device) -> torch.Tensor:
    """Return the four words of each of ``num`` counts, from ``first`` on."""
    out = torch.empty(_programs(num), _ROWS * 4, dtype=torch.int64, device=device)
    _launch(_words, out, signed(key[0]), signed(key[1]), first)
    return out.view(-1)[: 4 * num]


def kept(key: Key, at: range, limits: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Return which positions' 16 bits are below the first limit, or equal it with 32 more below the second."""
    row, skipped = divmod(at.start, 16)
    out = torch.empty(_programs((skipped + len(at) + 15) // 16), _ROWS * 16, dtype=torch.bool, device=device)
    keys = signed(key[0]), signed(key[1]), signed(key[0] ^ OTHER)
    _launch(_kept, out.view(torch.int8), *keys, row, *limits)
    return out.view(-1)[skipped : skipped + len(at)]


def _programs(rows: int) -> int:
    return (rows + _ROWS - 1) // _ROWS


def _launch(kernel: Any, out: torch.Tensor, *numbers: int) -> None:
    if not len(out):
        return
    if out.is_cpu:  # in Triton's interpreter
        kernel[(len(out),)](out, *numbers, ROWS=_ROWS)
        return
    with torch.get_device_module(out.device).device(out.device):
        kernel[(len(out),)](out, *numbers, ROWS=_ROWS)
