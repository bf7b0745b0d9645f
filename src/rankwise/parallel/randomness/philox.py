# SPDX-License-Identifier: Apache-2.0
"""The bits of Philox4x64-10 at given positions: the same on every device, drawn where they are needed.

NumPy's on CPUs, a Triton kernel on GPUs, operations on tensors on other devices. Keys and positions reach a device as
numbers, so nothing waits for it.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import importlib
import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rankwise.errors import ConfigurationError
from rankwise.log import warn
from rankwise.world.device.kinds import kind_named
from rankwise.world.device.streams import is_capturing

if TYPE_CHECKING:
    import numpy.typing as npt

    Key = tuple[int, int]
    """Which stream of numbers: two integers of 64 bits."""

OTHER = 0x9E3779B97F4A7C15
"""Changes a key into another one, for more bits of the same positions."""
WORDS_PER_COUNT = 4
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_NUM_ROUNDS = 10
_MASK32 = 2**32 - 1
_MOST_COUNTS = 2**18
"""How many counts are computed together by operations on tensors, which takes a few hundred bytes for each."""


class _Philox(threading.local):
    """One generator per thread: setting its state is seven times as fast as creating one."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(key=0)
        self.state: Any = self.bits.state
        self.key: npt.NDArray[np.uint64] = self.state["state"]["key"]
        self.counter: npt.NDArray[np.uint64] = self.state["state"]["counter"]


_philox = _Philox()


def numpy_words(key: Key, first: int, count: int) -> npt.NDArray[np.uint64]:
    """Return the 64 bits of each of ``count`` positions of a key, from ``first`` on."""
    philox = _philox
    skipped = first % WORDS_PER_COUNT
    philox.key[:] = key
    philox.counter[0] = first // WORDS_PER_COUNT
    philox.bits.state = philox.state
    words = philox.bits.random_raw(skipped + count)
    return words[skipped:] if skipped else words


def bits(key: Key, at: range, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the bits of positions as integers of a dtype, of which a word of 64 bits has several."""
    if not at:
        return torch.empty(0, dtype=dtype, device=device)
    per_word = 8 // dtype.itemsize
    start, skipped = divmod(at.start, per_word)
    num_words = (skipped + len(at) + per_word - 1) // per_word
    if device.type == "cpu":
        words = torch.from_numpy(numpy_words(key, start, num_words).view(np.int64))
    else:
        first_count, words_skipped = divmod(start, WORDS_PER_COUNT)
        num_counts = (words_skipped + num_words + WORDS_PER_COUNT - 1) // WORDS_PER_COUNT
        triton = _triton(device)
        draw = words_by_tensors if triton is None else triton.words
        words = draw(key, first_count, num_counts, device)[words_skipped : words_skipped + num_words]
    return words.view(dtype)[skipped : skipped + len(at)]


def kept(key: Key, at: range, limits: tuple[int, float], device: torch.device) -> torch.Tensor:
    """Return which positions have 16 bits below the first limit, on a device.

    Where they equal it, 32 more bits are compared with the second limit, from 0 to 1.
    """
    whole, more = limits[0], math.ceil(limits[1] * 2**32)
    if whole == 2**16:
        return torch.ones(len(at), dtype=torch.bool, device=device)
    triton = _triton(device)
    if triton is not None:
        drawn: torch.Tensor = triton.kept(key, at, (whole, more), device)
        return drawn
    # torch compares signed integers: flipping the highest bit keeps the order.
    leading = bits(key, at, torch.int16, device) ^ -(2**15)
    below = leading < whole - 2**15
    if more:
        trailing = bits((key[0] ^ OTHER, key[1]), at, torch.int32, device) ^ -(2**31)
        below |= (leading == whole - 2**15) & (trailing <= more - 1 - 2**31)
    return below


def words_by_tensors(key: Key, first: int, num: int, device: torch.device) -> torch.Tensor:
    """Return the four words of each of ``num`` counts, from ``first`` on, computed by operations on tensors."""
    out = torch.empty(num, WORDS_PER_COUNT, dtype=torch.int64, device=device)
    factors = _column(_MULTIPLIERS, device)
    low, high = factors & _MASK32, _upper(factors)
    steps = _column(_STEPS, device)
    for start in range(0, num, _MOST_COUNTS):
        stop = min(start + _MOST_COUNTS, num)
        # Words 0 and 2 of each count are multiplied, words 1 and 3 are added to the products. NumPy counts from one.
        even = torch.zeros(2, stop - start, dtype=torch.int64, device=device)
        odd = torch.zeros_like(even)
        torch.arange(first + start + 1, first + stop + 1, out=even[0])
        keys = _column(key, device)
        for _ in range(_NUM_ROUNDS):
            even_low, even_high = even & _MASK32, _upper(even)
            middle = even_high * low + _upper(even_low * low)
            other = even_low * high + (middle & _MASK32)
            above = even_high * high + _upper(middle) + _upper(other)
            even, odd = above.flip(0) ^ odd ^ keys, (even * factors).flip(0)
            keys = keys + steps
        out[start:stop, 0::2] = even.T
        out[start:stop, 1::2] = odd.T
    return out.view(-1)


def _upper(words: torch.Tensor) -> torch.Tensor:
    return words >> 32 & _MASK32


def _column(values: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Return two words of 64 bits, one below the other, without a copy from the CPU."""
    column = torch.empty(2, 1, dtype=torch.int64, device=device)
    for at, value in enumerate(values):
        column[at].fill_(signed(value))
    return column


def signed(word: int) -> int:
    """Return the signed integer of the same 64 bits."""
    return (word + 2**63 & 2**64 - 1) - 2**63


class _Triton:
    """The Triton kernels: a module; ``None`` where they do not work."""

    kernels: Any = None
    is_tried = False


def _triton(device: torch.device) -> Any:  # a module whose import may fail
    """Return the Triton kernels, if this device and this machine can run them."""
    if not kind_named(device.type).has_triton:
        return None
    if is_capturing(device):
        raise ConfigurationError(
            "Random numbers were drawn while a graph was captured: each replay would repeat the same ones.",
            evidence="they are computed from a number that each forward pass takes from the CPU's generator",
            do="capture a part of the step that draws none, or set the dropout probability to 0",
        )
    if not _Triton.is_tried:
        _Triton.is_tried = True
        try:
            kernels = importlib.import_module("rankwise.parallel.randomness.triton_philox")
            kernels.words((0, 0), 0, 1, device)
        except Exception as error:  # noqa: BLE001 - no Triton, no C compiler, or a kernel that does not compile: all alike
            warn(
                f"Triton cannot run on this machine ({type(error).__name__}: {error}); random numbers of models and "
                "blocks are the same without it, but take hundreds of small operations per draw; install triton and a "
                "C compiler"
            )
        else:
            _Triton.kernels = kernels
    return _Triton.kernels
