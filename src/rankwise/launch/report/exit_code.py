# SPDX-License-Identifier: Apache-2.0
"""An exit code as text, as a shell reports it, and what killed a process: the kernel's OOM killer, or something else.

The exit code does not show it, but the kernel counts. Imported by everything that reports how a process exited.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

OUT_OF_MEMORY = "by the kernel: the machine was out of memory, or a memory limit was reached"
KILLED = "by a user, a program or a scheduler, not by the kernel's out-of-memory killer"


def shell_code(exit_code: int) -> int:
    """Return an exit code as a shell reports it: 128 plus the signal's number for a signal."""
    return 128 - exit_code if exit_code < 0 else exit_code


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def in_words(exit_code: int) -> str:
    """Return how a process exited; ``wait`` reports a signal as a negative exit code."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    hint = ""
    if -exit_code == signal.SIGKILL:
        hint = "; if no one killed it, the machine was out of memory (see `dmesg`)"
    return f"killed by {signal_name(-exit_code)}, exit code {shell_code(exit_code)}{hint}"


def killed_in_words(exit_code: int, *, out_of_memory: bool | None) -> str:
    """Return what killed a process; empty if it was not killed, or if ``out_of_memory`` is unknown."""
    if exit_code != -signal.SIGKILL or out_of_memory is None:
        return ""
    by = OUT_OF_MEMORY if out_of_memory else KILLED
    return f"killed by SIGKILL, exit code {shell_code(exit_code)}; {by}"


# -- what the kernel counts ----------------------------------------------------------------------------------


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
