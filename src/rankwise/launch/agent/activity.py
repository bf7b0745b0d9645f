# SPDX-License-Identifier: Apache-2.0
"""How much a rank's processes have computed, read and written: whether a rank that says nothing makes progress.

Reads ``/proc``, asks no process. Imported by ``stragglers``.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

IDLE_SHARE = 0.05
"""A rank that has used less of one core makes no progress: what polls while it waits takes a few percent."""
IDLE_BYTES = 1 << 20
"""And that has read and written less than this: a save to a slow disk takes no CPU time."""
_STATE, _PGRP, _UTIME, _CSTIME = 0, 2, 11, 14
"""Fields of ``/proc/PID/stat`` behind the command's name. Source: proc_pid_stat(5)."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What the processes of one rank have used since they were started."""

    cpu_seconds: float
    num_bytes: int
    """Read and written, files and pipes."""
    is_runnable: bool = False
    """Whether one of them runs or waits for a core now, which on a busy machine takes no CPU time."""

    def since(self, earlier: Activity) -> Activity:
        """Return what was used after ``earlier``; processes that have ended in between may hide some."""
        cpu_seconds = max(0.0, self.cpu_seconds - earlier.cpu_seconds)
        return Activity(cpu_seconds, max(0, self.num_bytes - earlier.num_bytes), self.is_runnable)

    def is_idle(self, seconds: float) -> bool:
        """Return whether this is too little, over ``seconds``, for a rank that is at work."""
        return not self.is_runnable and self.cpu_seconds < IDLE_SHARE * seconds and self.num_bytes < IDLE_BYTES


def activity_of(pids: list[int]) -> dict[int, Activity]:
    """Return what each of these ranks has used, with the processes of its process group: loader workers, and others.

    Args:
        pids: process number of each rank, which is also the number of its process group.
    """
    ticks = os.sysconf("SC_CLK_TCK")
    cpu, moved, runnable = dict.fromkeys(pids, 0), dict.fromkeys(pids, 0), set[int]()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            stat = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            group = int(stat[_PGRP])
            if group in cpu:
                # Those of children that have ended and been waited for are in the last two.
                cpu[group] += sum(map(int, stat[_UTIME : _CSTIME + 1]))
                moved[group] += _bytes_of(entry)
                if stat[_STATE] == "R":
                    runnable.add(group)
    return {pid: Activity(cpu[pid] / ticks, moved[pid], pid in runnable) for pid in pids}


def _bytes_of(entry: Path) -> int:
    """Return what a process has read and written. Source: proc_pid_io(5)."""
    with contextlib.suppress(OSError, ValueError):
        lines = (entry / "io").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar:", "wchar:")))
    return 0
