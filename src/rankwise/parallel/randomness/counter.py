# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are functions of a key and a position, so that each rank can draw its own rows alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rankwise.parallel.randomness import philox
from rankwise.parallel.randomness.philox import OTHER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from rankwise.parallel.randomness.philox import Key

    Sampler = Callable[[Key, range, torch.dtype, Sequence[Any], torch.device], torch.Tensor]
    """Of a key and positions: the numbers there, of a distribution with these arguments, on a device."""

_MASK64 = 2**64 - 1


def _narrow_words(
    key: Key, first: int, count: int, per_word: int, dtype: type[np.unsignedinteger[Any]]
) -> npt.NDArray[Any]:
    """Return fewer bits for each of ``count`` positions, of which a word has several."""
    skipped = first % per_word
    words = philox.numpy_words(key, first // per_word, (skipped + count + per_word - 1) // per_word).view(dtype)
    return words[skipped : skipped + count]


def _unit(key: Key, at: range, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return numbers in [0, 1), of as many bits as the dtype has."""
    if dtype == torch.float64:
        bits = philox.bits(key, at, torch.int64, device)
        return (bits.bitwise_right_shift_(11).bitwise_and_(2**53 - 1)).double().mul_(2.0**-53)
    bits = philox.bits(key, at, torch.int32, device)
    return bits.bitwise_right_shift_(8).bitwise_and_(2**24 - 1).float().mul_(2.0**-24)


def mixed(number: int) -> int:
    """Return 64 bits, about half of which differ between consecutive numbers.

    Source: the last step of SplitMix64, Steele et al. (OOPSLA 2014).
    """
    bits = (number + 1) * 0x9E3779B97F4A7C15 & _MASK64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _MASK64
    return bits ^ bits >> 31


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
    bits = _narrow_words(key, first, count, 4, np.uint16)
    if whole == 2**16:
        below = np.less_equal(bits, np.uint16(2**16 - 1), out=out)
    else:
        limit = np.uint16(whole)
        below = np.less(bits, limit, out=out)
        if rest:
            for at in np.flatnonzero(bits == limit):
                below[at] = _narrow_words((key[0] ^ OTHER, key[1]), first + int(at), 1, 2, np.uint32)[0] < rest * 2**32
    return below


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
    return philox.kept(key, at, _limits(probability), device)


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
    return _remainders(philox.bits(key, at, torch.int64, device), high - low).add_(low)


def _remainders(words: torch.Tensor, divisor: int) -> torch.Tensor:
    """Return words modulo a divisor, as unsigned integers, of which torch has no arithmetic."""
    if words.is_cpu:
        return torch.from_numpy((words.numpy().view(np.uint64) % np.uint64(divisor)).view(np.int64))
    if divisor & divisor - 1 == 0:
        return words & philox.signed(divisor - 1)
    if divisor > 2**63:
        return torch.where((words ^ -(2**63)) < divisor - 2**63, words, words - philox.signed(divisor))
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
