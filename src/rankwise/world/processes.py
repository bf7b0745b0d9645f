# SPDX-License-Identifier: Apache-2.0
"""The processes of this machine, as the kernel lists them in ``/proc``. Linux only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


class ProcessStat(NamedTuple):
    """What the kernel reports of a process. Source: proc_pid_stat(5)."""

    pid: int
    name: str
    """The first 15 bytes of its program's name."""
    state: str
    """One letter: ``R`` runs, ``T`` was stopped, ``Z`` has exited and has not been waited for."""
    parent: int
    group: int
    """Its process group id."""
    cpu_ticks: int
    """CPU time of the process and of its children that have exited and been waited for."""
    start_time: str
    """When it was started, in ticks since boot. Together with ``pid``, unique until the next boot."""


def stat_of(pid: int) -> ProcessStat | None:
    """Return what the kernel reports of a process; ``None`` if it does not exist, or without ``/proc``."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name is in parentheses and may itself contain spaces and parentheses.
    before, _, after = text.rpartition(")")
    fields = after.split()
    if not fields:
        return None
    return ProcessStat(
        pid=pid,
        name=before.partition("(")[2],
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        cpu_ticks=sum(map(int, fields[11:15])),
        start_time=fields[19],
    )


def all_stats() -> Iterator[ProcessStat]:
    """Yield what the kernel reports of every process that this one may see."""
    for entry in Path("/proc").glob("[0-9]*"):
        stat = stat_of(int(entry.name))
        if stat is not None:
            yield stat


def machine_name() -> str:
    """Return an identifier of this boot of the machine and of the container: process ids are unique within these.

    Raises:
        OSError: there is no ``/proc``.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
