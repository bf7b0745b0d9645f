# SPDX-License-Identifier: Apache-2.0
"""Sleeping until another process changes a word of shared memory, and waking those who sleep.

Stands on Linux's futex(2), called through the C library: Python offers no call for it. The kernel looks at the
word and falls asleep in one step, so no wake-up is lost.
"""

from __future__ import annotations

import ctypes
import platform

_CALL_NUMBERS = {"x86_64": 202}
_WAIT = 0
_WAKE = 1
_EVERYONE = 2**31 - 1
_NUMBER = _CALL_NUMBERS.get(platform.machine())


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


def is_available() -> bool:
    """Return whether this machine has it, and orders stores as shared memory here needs them.

    x86-64 shows the stores of one core to every other in the order in which they were made. Others need
    fences, which Python cannot place.
    """
    return _NUMBER is not None and platform.system() == "Linux"


def sleep_while(address: int, value: int, seconds: float) -> None:
    """Sleep while the 32-bit word at ``address`` is ``value``, for at most ``seconds``. May return early."""
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _syscall(_NUMBER, address, _WAIT, value & 0xFFFFFFFF, ctypes.addressof(limit), None, 0)


def wake(address: int) -> None:
    """Wake every process that sleeps on the word at ``address``."""
    _syscall(_NUMBER, address, _WAKE, _EVERYONE, None, None, 0)
