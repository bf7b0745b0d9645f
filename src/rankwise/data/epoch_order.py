# SPDX-License-Identifier: Apache-2.0
"""The order of an epoch as a function: which sample is at a position, for any position directly; and samples' seeds.

Holds no list of indices, uses no torch and no process group. The order of a user's sampler is in ``sampler_order``.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

_ROUNDS = 8
_ROUNDS_OF_SHORT = 24
_SHORT = 4096
"""Below this the digits are so small that eight rounds leave some orders 15 % too frequent."""
_MULTIPLIER_1 = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_2 = np.uint64(0xD6E8FEB86659FD93)
_HALF_WORD = np.uint64(32)
_SPLIT_MIX_STEP = _MULTIPLIER_1
_SPLIT_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_SPLIT_MIX_2 = np.uint64(0x94D049BB133111EB)

MAX_LENGTH = 2**62
"""Longest sequence that can be ordered: sums of two positions must fit into 63 bits."""


class Permutation:
    """A random order of ``range(n)``, evaluated on demand.

    The order is a pure function of ``(n, seed, epoch)``, the same on every machine, and takes a few hundred bytes for
    any ``n``.

    A position is split into two digits, ``low`` in ``[0, a)`` and ``high`` in ``[0, b)``, where ``a * b`` is the least
    product of near-equal factors that holds ``n``. Eight rounds (24 for short sequences) add to one digit, modulo its
    size, a keyed function of the other, in turn; each round can be undone, so the whole is a bijection of
    ``[0, a * b)``. A result that is not below ``n`` goes through the rounds again until it is ("cycle walking"). As
    ``a * b - n < a``, few results do: with digits of whole bits every second one would.

    Args:
        n: length of the sequence, at least 0.
        seed: any integer.
        epoch: any integer.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), the generalised-Feistel cipher
        and cycle walking; not for secrecy here, the round function is a multiplicative hash.
    """

    __slots__ = ("_high_size", "_keys", "_low_size", "_n")

    def __init__(self, n: int, seed: int = 0, epoch: int = 0) -> None:
        if not 0 <= n <= MAX_LENGTH:
            raise ValueError(f"the length must be from 0 to 2**62, got {n}")
        low_size = max(1, math.isqrt(max(n - 1, 0)) + 1)
        self._n = np.uint64(n)
        self._low_size = np.uint64(low_size)
        self._high_size = np.uint64(max(1, -(-n // low_size)))
        rounds = _ROUNDS_OF_SHORT if n < _SHORT else _ROUNDS
        digest = hashlib.shake_128(f"rankwise order {n}/{seed}/{epoch}".encode()).digest(8 * rounds)
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __len__(self) -> int:
        return int(self._n)

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the sample at each position.

        Args:
            positions: [any shape] of int64, each in ``[0, n)``.

        Returns:
            [same shape] of int64, each in ``[0, n)``. A new array.

        Raises:
            IndexError: a position is outside ``[0, n)``.
        """
        places = np.ascontiguousarray(positions, dtype=np.int64).view(np.uint64).ravel()
        if places.size and places.max() >= self._n:
            raise IndexError(f"positions must be in [0, {self._n})")
        samples = self._rounds(places)
        outside = np.flatnonzero(samples >= self._n)
        while outside.size:
            walked = self._rounds(samples[outside])
            samples[outside] = walked
            outside = outside[walked >= self._n]
        return samples.view(np.int64).reshape(np.shape(positions))

    def _rounds(self, places: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        high, low = np.divmod(places, self._low_size)
        hashed = np.empty_like(places)
        shifted = np.empty_like(places)
        digits, sizes = (low, high), (self._low_size, self._high_size)
        for number, key in enumerate(self._keys):
            changed, size = digits[number % 2], sizes[number % 2]
            np.add(digits[1 - number % 2], key, out=hashed)
            np.multiply(hashed, _MULTIPLIER_1, out=hashed)
            np.right_shift(hashed, _HALF_WORD, out=shifted)
            np.bitwise_xor(hashed, shifted, out=hashed)
            np.multiply(hashed, _MULTIPLIER_2, out=hashed)
            # The upper half of the word, scaled to [0, size): no division, and the best-mixed bits.
            np.right_shift(hashed, _HALF_WORD, out=hashed)
            np.multiply(hashed, size, out=hashed)
            np.right_shift(hashed, _HALF_WORD, out=hashed)
            np.add(changed, hashed, out=changed)
            # Subtracts size if the sum reached it: below that, the difference wraps around.
            np.subtract(changed, size, out=shifted)
            np.minimum(changed, shifted, out=changed)
        np.multiply(high, self._low_size, out=high)
        return np.add(high, low, out=high)


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the 64-bit seed of an epoch. ``seed`` and ``epoch`` are any integers."""
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8, person=b"rankwise.seeds").digest()
    return int.from_bytes(digest, "little")


def sample_seeds(seed: int, epoch: int, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Return the seed of each sample of ``indices`` in ``epoch``.

    A pure function of ``(seed, epoch, index)``: independent of rank, worker and batch. 32 bits are the widest seed that
    NumPy's and MONAI's generators take.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), SplitMix64: its
        output at step ``index`` of the stream begun at ``epoch_seed``.
    """
    state = (indices.astype(np.uint64) + np.uint64(1)) * _SPLIT_MIX_STEP + np.uint64(epoch_seed(seed, epoch))
    state = (state ^ (state >> np.uint64(30))) * _SPLIT_MIX_1
    state = (state ^ (state >> np.uint64(27))) * _SPLIT_MIX_2
    return (state ^ (state >> np.uint64(31))).astype(np.uint32)
