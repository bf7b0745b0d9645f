# SPDX-License-Identifier: Apache-2.0
"""Forks of processes that have threads: no rankwise thread is in the middle of an operation during a fork.

A lock that another thread holds at a fork is never released in the child, and from Python 3.12 on such a fork warns.
Used by code that runs threads in a rank, and by code that forks: the launcher, and a loader that starts its workers.
"""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    import threading
    from collections.abc import Generator

_locks: WeakSet[threading.Condition] = WeakSet()
_held: list[threading.Condition] = []


def hold_during_forks(lock: threading.Condition) -> None:
    """Have ``lock`` held during every fork of this process, for as long as it lives.

    Called for a lock that a thread holds whenever it does more than wait.
    """
    _locks.add(lock)


@contextmanager
def threads_are_known() -> Generator[None]:
    """Suppress Python's warning about threads inside the block, which forks.

    Called where every other thread is known: of a library that handles forks (BLAS, OpenMP), or of
    rankwise, which :func:`hold_during_forks` blocks.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"This process .* is multi-threaded, use of fork", DeprecationWarning)
        yield


def _hold() -> None:
    for lock in list(_locks):
        lock.acquire()
        _held.append(lock)


def _release() -> None:
    while _held:
        _held.pop().release()


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release)
