# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are functions of a key and a position, so that each rank can draw its own rows alone.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): Philox, as NumPy has it.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    Key = tuple[int, int]
    """Which stream of numbers: two integers of 64 bits."""

    Sampler = Callable[[Key, int, int, torch.dtype, Sequence[Any]], torch.Tensor]
    """Of a key, the first position and how many: the numbers there, of a distribution with these arguments."""

_WORDS_PER_COUNT = 4
_OTHER = 0x9E3779B97F4A7C15
"""Changes a key into another one, for more bits of the same positions."""
_MASK64 = 2**64 - 1


class _Philox(threading.local):
    """One generator per thread: setting its state is seven times as fast as creating one."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(key=0)
        self.state: Any = self.bits.state
        self.key: npt.NDArray[np.uint64] = self.state["state"]["key"]
        self.counter: npt.NDArray[np.uint64] = self.state["state"]["counter"]


_philox = _Philox()


def _words(key: Key, first: int, count: int) -> npt.NDArray[np.uint64]:
    """Return the 64 bits of each of ``count`` positions of a key, from ``first`` on."""
    philox = _philox
    skipped = first % _WORDS_PER_COUNT
    philox.key[:] = key
    philox.counter[0] = first // _WORDS_PER_COUNT
    philox.bits.state = philox.state
    words = philox.bits.random_raw(skipped + count)
    return words[skipped:] if skipped else words


def _narrow_words(
    key: Key, first: int, count: int, per_word: int, dtype: type[np.unsignedinteger[Any]]
) -> npt.NDArray[Any]:
    """Return fewer bits for each of ``count`` positions, of which a word has several."""
    skipped = first % per_word
    words = _words(key, first // per_word, (skipped + count + per_word - 1) // per_word).view(dtype)
    return words[skipped : skipped + count]


def _unit(key: Key, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers in [0, 1), of as many bits as the dtype has."""
    if dtype == torch.float64:
        return torch.from_numpy((_words(key, first, count) >> np.uint64(11)) * 2.0**-53)
    bits = torch.from_numpy((_narrow_words(key, first, count, 2, np.uint32) >> np.uint32(8)).view(np.int32))
    return bits.to(torch.float32).mul_(2.0**-24)


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
    if not 0 <= probability <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={probability}")
    whole, rest = divmod(probability * 2**16, 1)
    bits = _narrow_words(key, first, count, 4, np.uint16)
    if whole == 2**16:
        below = np.less_equal(bits, np.uint16(2**16 - 1), out=out)
    else:
        limit = np.uint16(whole)
        below = np.less(bits, limit, out=out)
        if rest:
            for at in np.flatnonzero(bits == limit):
                below[at] = _narrow_words((key[0] ^ _OTHER, key[1]), first + int(at), 1, 2, np.uint32)[0] < rest * 2**32
    return below


def _bernoulli(key: Key, first: int, count: int, _: torch.dtype, args: Sequence[Any]) -> torch.Tensor:
    return torch.from_numpy(kept(key, first, count, args[0] if args else 0.5))


def _uniform(key: Key, first: int, count: int, dtype: torch.dtype, args: Sequence[Any]) -> torch.Tensor:
    low, high = (float(one) for one in (*args, *(0.0, 1.0)[len(args) :]))
    if not low <= high:
        raise RuntimeError(f"uniform_ expects to return a [from, to) range, but found from={low} > to={high}")
    return _unit(key, first, count, dtype).mul_(high - low).add_(low)


def _normal(key: Key, first: int, count: int, dtype: torch.dtype, args: Sequence[Any]) -> torch.Tensor:
    """Source: Box and Muller (1958), the cosine of each pair."""
    mean, std = (float(one) for one in (*args, *(0.0, 1.0)[len(args) :]))
    if std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    radius = _unit(key, first, count, dtype).neg_().log1p_().mul_(-2).sqrt_()
    angle = _unit((key[0] ^ _OTHER, key[1]), first, count, dtype).mul_(2 * math.pi)
    return radius.mul_(angle.cos_()).mul_(std).add_(mean)


def _exponential(key: Key, first: int, count: int, dtype: torch.dtype, args: Sequence[Any]) -> torch.Tensor:
    rate = float(args[0]) if args else 1.0
    if rate <= 0:
        raise RuntimeError(f"exponential_ expects lambda > 0.0, but found lambda={rate}")
    # Without it, one number in 2**24 is zero, and gumbel_softmax takes its logarithm.
    half_step = 2.0**-54 if dtype == torch.float64 else 2.0**-25
    return _unit(key, first, count, dtype).add_(half_step).neg_().log1p_().mul_(-1 / rate)


_MANTISSA_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53, torch.bool: 1}


def _integers(key: Key, first: int, count: int, dtype: torch.dtype, args: Sequence[Any]) -> torch.Tensor:
    low = int(args[0]) if len(args) == 2 else 0  # noqa: PLR2004 - from and to
    if args and args[-1] is not None:
        high = int(args[-1])
    else:
        high = 2 ** (_MANTISSA_BITS.get(dtype) or torch.iinfo(dtype).bits - (1 if dtype.is_signed else 0))
    if high <= low:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
    words = _words(key, first, count) % np.uint64(high - low)
    return torch.from_numpy(words.view(np.int64)).add_(low)


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
