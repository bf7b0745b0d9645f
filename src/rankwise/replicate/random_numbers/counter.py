# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are functions of a key and a position, so that each rank can draw its own rows alone.

In order: the bits of Philox4x64-10 at given positions, and the distributions made of them. The bits are the same on
every device, drawn where they are needed: NumPy's on CPUs, a Triton kernel on GPUs, operations on tensors on other
devices. Keys and positions reach a device as numbers, so nothing waits for it.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import importlib
import math
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rankwise.errors import ConfigurationError
from rankwise.log import warn
from rankwise.world.device.kinds import kind_named
from rankwise.world.device.streams import is_capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    Key = tuple[int, int]
    """Which stream of numbers: two integers of 64 bits."""
    Sampler = Callable[[Key, range, torch.dtype, Sequence[Any], torch.device], torch.Tensor]
    """Of a key and positions: the numbers there, of a distribution with these arguments, on a device."""

OTHER = 0x9E3779B97F4A7C15
"""Changes a key into another one, for more bits of the same positions."""
WORDS_PER_COUNT = 4
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_NUM_ROUNDS = 10
_MASK32, _MASK64 = 2**32 - 1, 2**64 - 1
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


def _numpy_words(key: Key, first: int, count: int) -> npt.NDArray[np.uint64]:
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
        words = torch.from_numpy(_numpy_words(key, start, num_words).view(np.int64))
    else:
        first_count, words_skipped = divmod(start, WORDS_PER_COUNT)
        num_counts = (words_skipped + num_words + WORDS_PER_COUNT - 1) // WORDS_PER_COUNT
        triton = _triton(device)
        draw = words_by_tensors if triton is None else triton.words
        words = draw(key, first_count, num_counts, device)[words_skipped : words_skipped + num_words]
    return words.view(dtype)[skipped : skipped + len(at)]


def _kept_on_device(key: Key, at: range, limits: tuple[int, float], device: torch.device) -> torch.Tensor:
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
            kernels = importlib.import_module("rankwise.replicate.random_numbers.triton_philox")
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


def _narrow_words(
    key: Key, first: int, count: int, per_word: int, dtype: type[np.unsignedinteger[Any]]
) -> npt.NDArray[Any]:
    """Return fewer bits for each of ``count`` positions, of which a word has several."""
    skipped = first % per_word
    words = _numpy_words(key, first // per_word, (skipped + count + per_word - 1) // per_word).view(dtype)
    return words[skipped : skipped + count]


def _unit(key: Key, at: range, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return numbers in [0, 1), of as many bits as the dtype has."""
    if dtype == torch.float64:
        words = bits(key, at, torch.int64, device)
        return (words.bitwise_right_shift_(11).bitwise_and_(2**53 - 1)).double().mul_(2.0**-53)
    words = bits(key, at, torch.int32, device)
    return words.bitwise_right_shift_(8).bitwise_and_(2**24 - 1).float().mul_(2.0**-24)


def mixed(number: int) -> int:
    """Return 64 bits, about half of which differ between consecutive numbers.

    Source: the last step of SplitMix64, Steele et al. (OOPSLA 2014).
    """
    word = (number + 1) * 0x9E3779B97F4A7C15 & _MASK64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _MASK64
    return word ^ word >> 31


def kept(key: Key, first: int, count: int, probability: float, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
    """Return which of ``count`` positions are kept with a probability.

    16 bits decide; if they equal those of the probability, once in 65536, 32 more decide.

    Args:
        key: of the numbers.
        first: position.
        count: of positions.
        probability: from 0 to 1.
        out: [count], to write ones and zeros into, of any dtype.
    """
    whole, rest = _limits(probability)
    drawn = _narrow_words(key, first, count, 4, np.uint16)
    if whole == 2**16:
        below = np.less_equal(drawn, np.uint16(2**16 - 1), out=out)
    else:
        limit = np.uint16(whole)
        below = np.less(drawn, limit, out=out)
        if rest:
            for at in np.flatnonzero(drawn == limit):
                below[at] = _narrow_words((key[0] ^ OTHER, key[1]), first + int(at), 1, 2, np.uint32)[0] < rest * 2**32
    return below


@lru_cache
def _limits(probability: float) -> tuple[int, float]:
    """Return 65536 times a probability, as a whole number and the rest."""
    if not 0 <= probability <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={probability}")
    whole, rest = divmod(probability * 2**16, 1)
    return int(whole), rest


def _bernoulli(key: Key, at: range, _: torch.dtype, args: Sequence[Any], device: torch.device) -> torch.Tensor:
    probability = args[0] if args else 0.5
    if device.type == "cpu":
        return torch.from_numpy(kept(key, at.start, len(at), probability))
    return _kept_on_device(key, at, _limits(probability), device)


def _uniform(key: Key, at: range, dtype: torch.dtype, args: Sequence[Any], device: torch.device) -> torch.Tensor:
    low, high = (float(one) for one in (*args, *(0.0, 1.0)[len(args) :]))
    if not low <= high:
        raise RuntimeError(f"uniform_ expects to return a [from, to) range, but found from={low} > to={high}")
    return _unit(key, at, dtype, device).mul_(high - low).add_(low)


def _normal(key: Key, at: range, dtype: torch.dtype, args: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Source: Box and Muller (1958), the cosine of each pair."""
    mean, std = (float(one) for one in (*args, *(0.0, 1.0)[len(args) :]))
    if std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    radius = _unit(key, at, dtype, device).neg_().log1p_().mul_(-2).sqrt_()
    angle = _unit((key[0] ^ OTHER, key[1]), at, dtype, device).mul_(2 * math.pi)
    return radius.mul_(angle.cos_()).mul_(std).add_(mean)


def _exponential(key: Key, at: range, dtype: torch.dtype, args: Sequence[Any], device: torch.device) -> torch.Tensor:
    rate = float(args[0]) if args else 1.0
    if rate <= 0:
        raise RuntimeError(f"exponential_ expects lambda > 0.0, but found lambda={rate}")
    # Without it, one number in 2**24 is zero, and gumbel_softmax takes its logarithm.
    half_step = 2.0**-54 if dtype == torch.float64 else 2.0**-25
    return _unit(key, at, dtype, device).add_(half_step).neg_().log1p_().mul_(-1 / rate)


_MANTISSA_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53, torch.bool: 1}


def _integers(key: Key, at: range, dtype: torch.dtype, args: Sequence[Any], device: torch.device) -> torch.Tensor:
    low = int(args[0]) if len(args) == 2 else 0  # noqa: PLR2004 - from and to
    if args and args[-1] is not None:
        high = int(args[-1])
    else:
        high = 2 ** (_MANTISSA_BITS.get(dtype) or torch.iinfo(dtype).bits - (1 if dtype.is_signed else 0))
    if high <= low:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
    return _remainders(bits(key, at, torch.int64, device), high - low).add_(low)


def _remainders(words: torch.Tensor, divisor: int) -> torch.Tensor:
    """Return words modulo a divisor, as unsigned integers, of which torch has no arithmetic."""
    if words.is_cpu:
        return torch.from_numpy((words.numpy().view(np.uint64) % np.uint64(divisor)).view(np.int64))
    if divisor & divisor - 1 == 0:
        return words & signed(divisor - 1)
    if divisor > 2**63:
        return torch.where((words ^ -(2**63)) < divisor - 2**63, words, words - signed(divisor))
    halves = (words >> 1 & 2**63 - 1) % divisor
    doubled = halves - divisor + halves + (words & 1)
    return torch.where(doubled < 0, doubled + divisor, doubled)


SAMPLERS: dict[str, Sampler] = {
    "bernoulli_.float": _bernoulli,
    "uniform_": _uniform,
    "normal_": _normal,
    "exponential_": _exponential,
    "random_": _integers,
    "random_.to": _integers,
    "random_.from": _integers,
}
"""Operations that draw element by element; others draw for the whole batch with a generator of their own."""
