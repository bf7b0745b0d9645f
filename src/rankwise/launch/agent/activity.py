# SPDX-License-Identifier: Apache-2.0
"""How much a rank's processes have computed, read and written: whether a silent rank makes progress.

Reads ``/proc`` only. Imported by ``stragglers``.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from rankwise.world.processes import all_stats

IDLE_SHARE = 0.05
"""A rank that has used less of one core makes no progress: polling while waiting takes a few percent."""
IDLE_BYTES = 1 << 20
"""... if it has also read and written less than this: a save to a slow disk takes no CPU time."""


@dataclass(frozen=True, slots=True)
class Activity:
    """The resources that the processes of one rank have used since they were started."""

    cpu_seconds: float
    num_bytes: int
    """Bytes read and written, files and pipes."""
    is_runnable: bool = False
    """Whether one of them is running or waiting for a core now; waiting takes no CPU time on a busy machine."""

    def since(self, earlier: Activity) -> Activity:
        """Return what was used since ``earlier``; processes that have exited in between may hide some."""
        cpu_seconds = max(0.0, self.cpu_seconds - earlier.cpu_seconds)
        return Activity(cpu_seconds, max(0, self.num_bytes - earlier.num_bytes), self.is_runnable)

    def is_idle(self, seconds: float) -> bool:
        """Return whether this is too little, over ``seconds``, for a working rank."""
        return not self.is_runnable and self.cpu_seconds < IDLE_SHARE * seconds and self.num_bytes < IDLE_BYTES


def activity_of(pids: list[int]) -> dict[int, Activity]:
    """Return the activity of each of these ranks, including its process group: loader workers, and others.

    Args:
        pids: process id of each rank, which is also the id of its process group.
    """
    ticks = os.sysconf("SC_CLK_TCK")
    cpu, moved, runnable = dict.fromkeys(pids, 0), dict.fromkeys(pids, 0), set[int]()
    for stat in all_stats():
        if stat.group in cpu:
            cpu[stat.group] += stat.cpu_ticks
            moved[stat.group] += _bytes_of(stat.pid)
            if stat.state == "R":
                runnable.add(stat.group)
    return {pid: Activity(cpu[pid] / ticks, moved[pid], pid in runnable) for pid in pids}


def _bytes_of(pid: int) -> int:
    """Return how many bytes a process has read and written. Source: proc_pid_io(5)."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar:", "wchar:")))
    return 0
