# SPDX-License-Identifier: Apache-2.0
"""Whether the kernel's OOM killer has run: its counters, compared over time.

The exit code of a process does not show it: it is SIGKILL either way. Reads only. Imported by the agent.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_V1 = Path("sys/fs/cgroup/memory")
_V2 = Path("sys/fs/cgroup")


class OomCount:
    """How many processes the OOM killer has killed since this value was created.

    It counts those of this process's control group (a container, a Slurm step, a service), so that no other job on the
    machine counts; if that cannot be read, those of the machine.

    Args:
        root: where ``/proc`` and ``/sys`` are.
    """

    def __init__(self, root: str = "/") -> None:
        self._files = _counters(Path(root))
        self._before = self._read()

    def has_risen(self) -> bool | None:
        """Return whether the OOM killer has killed a process since; ``None`` if unknown.

        Source: cgroup-v1/memory.txt section 10, cgroup-v2.rst ``memory.events``, proc_vmstat(5).
        """
        now = self._read()
        if now is None or self._before is None:
            return None
        return now > self._before

    def _read(self) -> int | None:
        for file in self._files:
            with contextlib.suppress(OSError):
                count = oom_kills(file.read_text(encoding="ascii", errors="replace"))
                if count is not None:
                    return count
        return None


def oom_kills(text: str) -> int | None:
    """Return the count in ``memory.oom_control``, ``memory.events`` or ``/proc/vmstat``, if present."""
    for line in text.splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill" and count.strip().isdecimal():
            return int(count)
    return None


def _counters(root: Path) -> list[Path]:
    """Return the files to read, the nearest first."""
    found: list[Path] = []
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            found += _upwards(root / _V1, path, "memory.oom_control")
        elif not controllers:
            found += _upwards(root / _V2, path, "memory.events")
    return [*found, root / "proc/vmstat"]


def _upwards(mount: Path, path: str, name: str) -> list[Path]:
    """Return the group's file, if visible; in a container the path may be the host's, and the group the mount."""
    own = mount / path.strip("/") / name
    return [own] if own.exists() else [mount / name]
