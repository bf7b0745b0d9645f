# SPDX-License-Identifier: Apache-2.0
"""The progress of each rank of a host: a counter per rank in shared memory, and sleeping until one moves.

Built on Linux's futex(2), called through the C library: Python offers no call for it. The kernel checks the word and
puts the caller to sleep in one step, so no wake-up is lost.
"""

from __future__ import annotations

import ctypes
import platform
from typing import TYPE_CHECKING

from rankwise.comm.backends.mapping import LINE_BYTES, WORD_BYTES

if TYPE_CHECKING:
    from rankwise.comm.backends.mapping import Mapping

_SYSCALL_NUMBERS = {"x86_64": 202}
_WAIT = 0
_WAKE = 1
_EVERYONE = 2**31 - 1
SYSCALL_NUMBER = _SYSCALL_NUMBERS.get(platform.machine())


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_long,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_long,
)


def has_futex() -> bool:
    """Return whether this machine has futex, and orders stores as the shared memory here requires.

    x86-64 shows the stores of one core to every other in the order in which they were made. Others need
    fences, which Python cannot place.
    """
    return SYSCALL_NUMBER is not None and platform.system() == "Linux"


def sleep_while(address: int, value: int, seconds: float) -> None:
    """Sleep while the 32-bit word at ``address`` is ``value``, for at most ``seconds``. May return early."""
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _syscall(SYSCALL_NUMBER, address, _WAIT, value & 0xFFFFFFFF, ctypes.addressof(limit), None, 0)


def wake(address: int) -> None:
    """Wake every process that sleeps on the word at ``address``."""
    _syscall(SYSCALL_NUMBER, address, _WAKE, _EVERYONE, None, None, 0)


class Counters:
    """Counters that only grow. Legend: L ranks of this host."""

    def __init__(self, mapping: Mapping, start: int, rank: int, num_ranks: int) -> None:
        self._words = mapping.words
        places = [start + LINE_BYTES * other for other in range(num_ranks)]
        self._addresses = [mapping.address + place for place in places]
        self._own = places[rank] // WORD_BYTES
        self._own_address = self._addresses[rank]
        self._others = [(other, places[other] // WORD_BYTES) for other in range(num_ranks) if other != rank]

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        """Return how much memory the counters of ``num_ranks`` take."""
        return LINE_BYTES * num_ranks

    def post(self, value: int) -> None:
        """Advance this rank's counter and wake the ranks that sleep on it."""
        self._words[self._own] = value
        wake(self._own_address)

    def reach(self, value: int) -> bool:
        """Return whether every other rank has reached ``value``."""
        words = self._words
        return all(words[place] >= value for _, place in self._others)

    def last(self, value: int) -> int | None:
        """Return a rank of this host that has not reached ``value``."""
        return next((other for other, place in self._others if self._words[place] < value), None)

    def sleep_until(self, value: int, seconds: float) -> None:
        """Sleep until a rank that has not reached ``value`` advances, for at most ``seconds``."""
        for other, place in self._others:
            held = self._words[place]
            if held < value:
                sleep_while(self._addresses[other], held, seconds)
                return
