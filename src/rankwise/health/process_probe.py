# SPDX-License-Identifier: Apache-2.0
"""What can be seen from outside of a process that does not answer: whether it has ended, its state, and its stack.

A process that is stopped, or whose Python is held by a call into C, cannot speak for itself. Reads ``/proc``; asks for
a stack only where the process has said that it gives one. Used by ranks and by the launcher.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.world.processes import machine_name, stat_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


STACK_SIGNAL = signal.SIGRTMIN + 5
"""On which a rank writes its stack into its file, whatever holds Python's lock."""
DUMP_SECONDS = 1.0
"""How long a process has to write its stack."""
SETTLED_SECONDS = 0.05
"""A stack that has not grown for so long is whole."""
LONGEST_STACK_LINES = 24
_STATES = {
    "T": "stopped (SIGSTOP or Ctrl-Z; `kill -CONT {pid}` lets it go on)",
    "t": "stopped by a debugger (process {pid})",
    "Z": "its process {pid} has ended",
    "X": "its process {pid} has ended",
    "D": "in the kernel, in a call that cannot be interrupted (process {pid}): a disk or network file system",
}
HELD = "alive, but Python does not run: a call into C holds its lock"


@dataclass(frozen=True, slots=True)
class Process:
    """What tells a process from every other one, as one rank tells the others of itself."""

    host: str
    """Names the machine as it runs now, and the container: process numbers count within these."""
    pid: int
    stack_file: str
    """What it writes its stack into; empty where it does not."""

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)


def this_process(stack_file: str = "") -> Process:
    """Return this process."""
    host = ""
    with contextlib.suppress(OSError):
        host = machine_name()
    return Process(host, os.getpid(), stack_file)


def offer_stack(path: str) -> None:
    """Have this process write the stacks of all its threads to ``path`` on ``STACK_SIGNAL``, even inside C.

    The first line of the file is the process's number.

    Raises:
        OSError: the file cannot be written.

    Source: faulthandler.register.
    """
    # For the rest of the process: faulthandler holds on to the file, and writes into it without Python.
    file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
    file.write(f"{os.getpid()}\n")
    file.flush()
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)


def offered_by(path: str) -> int | None:
    """Return the number of the process that writes its stack to ``path``, where one does."""
    try:
        return int(Path(path).read_text(encoding="utf-8", errors="replace").partition("\n")[0])
    except (OSError, ValueError):
        return None


def state_of(pid: int, runs: str = HELD) -> str:
    """Return in words what keeps a process from answering.

    Args:
        pid: of the process.
        runs: what to say where the kernel sees nothing that does.

    Source: proc_pid_stat(5).
    """
    words = _STATES.get(_letter_of(pid))
    return f"{runs} (process {pid})" if words is None else words.format(pid=pid)


def start_time_of(pid: int) -> str:
    """Return when the kernel started a process, in its ticks; empty where it is not there, or without ``/proc``."""
    stat = stat_of(pid)
    return "" if stat is None else stat.start_time


def is_there(pid: int, start_time: str) -> bool:
    """Return whether a process has not ended.

    Args:
        pid: its number.
        start_time: as :func:`start_time_of` returned it; another process of that number has another.
    """
    if not start_time:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True
        return True
    # A process that nobody has waited for yet is still listed.
    return start_time_of(pid) == start_time and _letter_of(pid) not in {"Z", "X"}


def _letter_of(pid: int) -> str:
    stat = stat_of(pid)
    return "X" if stat is None else stat.state


def stack_of(pid: int, path: str, send: Callable[[int], None] | None = None) -> list[str]:
    """Return the stack of a process that gives it, innermost frame last; else nothing.

    Args:
        pid: of the process.
        path: the file that it writes its stack into.
        send: sends it a signal of this number; by default ``kill`` does.
    """
    if not path or offered_by(path) != pid or not _takes_signal(pid) or _letter_of(pid) in _STATES:
        return []
    file = Path(path)
    try:
        start = file.stat().st_size
        if send is None:
            os.kill(pid, STACK_SIGNAL)
        else:
            send(STACK_SIGNAL)
        _wait_until_whole(file, start)
        with file.open("rb") as opened:
            opened.seek(start)
            return lines_of_dump(opened.read().decode(errors="replace"))
    except OSError:
        return []


def lines_of_dump(text: str) -> list[str]:
    """Return the main thread's frames of what faulthandler wrote, innermost last, as ``file:line in function``."""
    # It lists the threads that were started last first; the one that trains was there before all.
    _, _, last = text.rpartition("hread 0x")
    lines = []
    for line in last.splitlines():
        words = line.strip()
        if words.startswith('File "') and '", line ' in words:
            name, _, rest = words.removeprefix('File "').partition('", line ')
            number, _, function = rest.partition(" in ")
            if not name.startswith("<frozen"):
                lines.append(f"{name}:{number} in {function}")
    return lines[:LONGEST_STACK_LINES][::-1]


def _takes_signal(pid: int) -> bool:
    """Return whether a process has something of its own to do on the signal: else it would end it."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)
    return False


def _wait_until_whole(file: Path, start: int) -> None:
    deadline = time.monotonic() + DUMP_SECONDS
    size, since = start, time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(0.005)
        now = file.stat().st_size
        if now != size:
            size, since = now, time.monotonic()
        elif size > start and time.monotonic() - since > SETTLED_SECONDS:
            return


class Peers:
    """Holds on to each process, so that its number cannot come to mean another one. Ranks are those of the host."""

    def __init__(self, world_ranks: Sequence[int], processes: Sequence[int]) -> None:
        self._world_ranks = list(world_ranks)
        self._processes = list(processes)
        self._handles: list[int | None] = []
        for process in processes:
            try:
                self._handles.append(os.pidfd_open(process))
            except OSError:  # it has ended already
                self._handles.append(None)

    def subset(self, ranks: Sequence[int]) -> Peers:
        """Return some of them, to be closed on their own."""
        return Peers([self._world_ranks[rank] for rank in ranks], [self._processes[rank] for rank in ranks])

    def __len__(self) -> int:
        return len(self._processes)

    def world_rank(self, rank: int) -> int:
        """Return the number in the world of a rank of this host."""
        return self._world_ranks[rank]

    def process(self, rank: int) -> int:
        """Return the process number of a rank of this host."""
        return self._processes[rank]

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of ``rank`` has ended."""
        if not self._handles:
            return False
        handle = self._handles[rank]
        if handle is None:
            return True
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Let go of the processes."""
        for handle in self._handles:
            if handle is not None:
                os.close(handle)
        self._handles.clear()
