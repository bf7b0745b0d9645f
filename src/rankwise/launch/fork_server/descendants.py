# SPDX-License-Identifier: Apache-2.0
"""The processes below this one, also those that have left their parents: adopting them, finding them, killing them.

Where the kernel is not Linux, processes are not adopted. Imported by ``server``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

from rankwise.world.processes import all_stats

LOOK_SECONDS = 0.01
"""After how long killed processes are checked again: their children are reparented here."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent exits. Source: prctl(2)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have this process killed when its parent exits. Source: prctl(2)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def children() -> list[int]:
    """Return the processes whose parent is this one."""
    own = os.getpid()
    return [stat.pid for stat in all_stats() if stat.parent == own]


def kill_since(start_time: int, limit_seconds: float) -> None:
    """Kill the descendants that started at ``start_time`` (ticks) or later; wait for them, up to ``limit_seconds``."""
    own = os.getpid()
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        left = [stat.pid for stat in all_stats() if stat.parent == own and int(stat.start_time) >= start_time]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(LOOK_SECONDS)


def _prctl(option: int, value: int) -> None:
    """Set a property of this process. Source: prctl(2); does nothing except on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
