# SPDX-License-Identifier: Apache-2.0
"""The process that saves into a folder, as described by its lock file, and whether it still runs.

Never compares the clocks of two machines: a process of this machine is looked up by its PID and start time, one of
another machine by whether its lock file keeps changing. Imported by ``folder_lock``.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.health import process_probe
from rankwise.world.environments.process import job_of_process

if TYPE_CHECKING:
    from typing import Self

LATEST_SECONDS = 1e11
"""The latest time that can be shown as a date."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LockOwner:
    """The process that holds a lock."""

    hostname: str
    machine: str
    """Identifies the machine's current boot and the container, in which PIDs are unique. Empty if unknown."""
    pid: int
    start_time: str
    """When the kernel started the process, in its own ticks; unique together with ``pid``. Empty if unknown."""
    command: str
    job: str
    """Unique name of the launcher's job; empty without one."""
    attempt: int
    """Number of the job's restart."""
    since: float
    """When the lock was taken, in seconds since the epoch by the owner's clock. For display only."""
    token: str
    """Distinguishes this lock from every other one."""

    @classmethod
    def this_process(cls) -> Self:
        """Return this process as the owner of a new lock."""
        job, attempt = job_of_process()
        return cls(
            hostname=socket.gethostname(),
            machine=process_probe.this_process().host,
            pid=os.getpid(),
            start_time=process_probe.start_time_of(os.getpid()),
            command=_script(),
            job=job,
            attempt=attempt,
            since=time.time(),
            token=secrets.token_hex(8),
        )

    def encode(self, num_refreshes: int) -> bytes:
        """Return the content of the lock file, which does not get shorter from one refresh to the next."""
        return (json.dumps({**asdict(self), "signs_of_life": num_refreshes}, indent=1) + "\n").encode()

    @property
    def description(self) -> str:
        """A description of the process."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.pid} on {self.hostname} ({self.command or 'python'}), since {since}"

    def is_running(self, viewer: LockOwner) -> bool | None:
        """Return whether the owner runs and its lock counts; ``None`` if ``viewer`` (this process) cannot know."""
        if self.job and self.job == viewer.job and self.attempt < viewer.attempt:
            # The launcher starts an attempt only when the previous one has ended.
            return False
        # Cloned machines may differ only in their name.
        if not self.machine or (self.machine, self.hostname) != (viewer.machine, viewer.hostname):
            return None
        if self.pid == viewer.pid:
            # An earlier lock of this process, or of an earlier process with its PID.
            return False
        return process_probe.is_there(self.pid, self.start_time)


def decode(content: bytes) -> LockOwner | None:
    """Return the owner that a lock file describes; ``None`` while it is being written, or for anything else."""
    try:
        saved = json.loads(content)
        # Later versions may add fields.
        owner = LockOwner(**{each.name: saved[each.name] for each in fields(LockOwner)})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    # Annotations are texts here: "str", "int" and "float".
    has_types = all(type(getattr(owner, each.name)).__name__ == each.type for each in fields(LockOwner))
    return owner if has_types and owner.pid > 0 and 0 <= owner.since < LATEST_SECONDS else None


def _script() -> str:
    """Return what this process runs, without its arguments, which may be private."""
    name = Path(sys.argv[0] if sys.argv else "").name
    return " ".join(name.encode(errors="replace").decode().split())[:100]


def read(path: Path) -> bytes | None:
    """Return the content of a lock file; ``None`` if there is none.

    Opens it again each time: network file systems then check with the server.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
