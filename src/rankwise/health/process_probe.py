# SPDX-License-Identifier: Apache-2.0
"""What every rank is doing: asked over the store (a status poll), and seen from outside where it does not answer.

The failure detector's thread answers a poll, so the script need not do anything for it. A process that is stopped, or
whose GIL is held by a call into C, cannot report itself: ``/proc`` shows whether it has exited and its state, and it is
asked for a stack if it has offered one. Used by ranks and by the launcher.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.health.event_log import StatusPoll, post
from rankwise.world.processes import machine_name, stat_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from rankwise.health.diagnosis import Answers
    from rankwise.store.client import Store

STACK_SIGNAL = signal.SIGRTMIN + 5
"""The signal on which a rank writes its stack into its file, whatever holds the GIL."""
DUMP_SECONDS = 1.0
"""How long a process may take to write its stack."""
CORE_SECONDS = 5.0
"""... and one that waits for a core of a busy machine: it will write it."""
SETTLED_SECONDS = 0.05
"""A stack that has not grown for this long, after its process handled the signal, is complete."""
LONGEST_STACK_LINES = 24
_STATES = {
    "T": "stopped (SIGSTOP or Ctrl-Z; `kill -CONT {pid}` resumes it)",
    "t": "stopped by a debugger (process {pid})",
    "Z": "its process {pid} has exited",
    "X": "its process {pid} has exited",
    "D": "in the kernel, in a call that cannot be interrupted (process {pid}): a disk or network file system",
}
HELD = "alive, but Python is not running: a call into C holds the GIL"


@dataclass(frozen=True, slots=True)
class Process:
    """What identifies a process among all others, as a rank publishes it to the others."""

    host: str
    """Identifies this boot of the machine, and the container: process ids are unique within these."""
    pid: int
    stack_file: str
    """The file it writes its stack into; empty if it does not."""


def this_process(stack_file: str = "") -> Process:
    """Return this process."""
    host = ""
    with contextlib.suppress(OSError):
        host = machine_name()
    return Process(host, os.getpid(), stack_file)


def offer_stack(path: str) -> None:
    """Have this process write the stacks of all its threads to ``path`` on ``STACK_SIGNAL``, even inside C.

    The first line of the file is the process id.

    Raises:
        OSError: the file cannot be written.

    Source: faulthandler.register.
    """
    # Open for the rest of the process: faulthandler keeps the file, and writes into it without Python.
    file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
    file.write(f"{os.getpid()}\n")
    file.flush()
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)


def offered_by(path: str) -> int | None:
    """Return the id of the process that writes its stack to ``path``, if there is one."""
    try:
        return int(Path(path).read_text(encoding="utf-8", errors="replace").partition("\n")[0])
    except (OSError, ValueError):
        return None


def state_of(pid: int, runs: str = HELD) -> str:
    """Return a description of what keeps a process from answering; ``runs`` if the kernel sees no cause.

    Source: proc_pid_stat(5).
    """
    words = _STATES.get(_letter_of(pid))
    return f"{runs} (process {pid})" if words is None else words.format(pid=pid)


def start_time_of(pid: int) -> str:
    """Return when the kernel started a process, in its ticks; empty if it does not exist, or without ``/proc``."""
    stat = stat_of(pid)
    return "" if stat is None else stat.start_time


def is_there(pid: int, start_time: str) -> bool:
    """Return whether a process has not exited.

    :func:`start_time_of` returned ``start_time``; another process with that id has a different one.
    """
    if not start_time:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True
        return True
    # A process that has not been waited for yet is still listed.
    return start_time_of(pid) == start_time and not has_exited(pid)


def has_exited(pid: int) -> bool:
    """Return whether a process has exited, even if it has not been waited for."""
    return _letter_of(pid) in {"Z", "X"}


def _letter_of(pid: int) -> str:
    stat = stat_of(pid)
    return "X" if stat is None else stat.state


def stack_of(pid: int, path: str, send: Callable[[int], None] | None = None) -> list[str]:
    """Return the stack of a process that offers it at ``path``, innermost frame last; else nothing.

    ``send`` sends it a signal of this number; by default ``kill`` does.
    """
    if not path or offered_by(path) != pid or not _has_signal(pid, "SigCgt") or _letter_of(pid) in _STATES:
        return []
    file = Path(path)
    try:
        start = file.stat().st_size
        if send is None:
            os.kill(pid, STACK_SIGNAL)
        else:
            send(STACK_SIGNAL)
        _wait_until_whole(pid, file, start)
        with file.open("rb") as opened:
            opened.seek(start)
            return lines_of_dump(opened.read().decode(errors="replace"))
    except OSError:
        return []


def lines_of_dump(text: str) -> list[str]:
    """Return the main thread's frames of what faulthandler wrote, innermost last, as ``file:line in function``."""
    # It lists the newest threads first; the training thread is the oldest.
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


def _has_signal(pid: int, *masks: str) -> bool:
    """Return whether ``STACK_SIGNAL`` is in one of these masks of a process. Source: proc_pid_status(5)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, mask = line.partition(":")
            if name in masks and int(mask, 16) >> (STACK_SIGNAL - 1) & 1:
                return True
    return False


def _wait_until_whole(pid: int, file: Path, start: int) -> None:
    """Wait until a process has handled the signal: it is pending first, and blocked while the handler writes."""
    begun = since = time.monotonic()
    size = start
    while True:
        # Read before the size: what was written by then is counted.
        is_due = _has_signal(pid, "SigPnd", "ShdPnd", "SigBlk")
        waited = time.monotonic() - begun
        now = file.stat().st_size
        if now != size:
            size, since = now, time.monotonic()
        elif size > start and not is_due and time.monotonic() - since > SETTLED_SECONDS:
            return
        if waited > (CORE_SECONDS if is_due and _letter_of(pid) == "R" else DUMP_SECONDS):
            return
        time.sleep(0.005)


class Peers:
    """Holds a descriptor of each process, so that a reused id is not mistaken for it. Ranks are those of the host."""

    def __init__(self, world_ranks: Sequence[int], processes: Sequence[int]) -> None:
        self._world_ranks = list(world_ranks)
        self._processes = list(processes)
        self._handles: list[int | None] = []
        for process in processes:
            try:
                self._handles.append(os.pidfd_open(process))
            except OSError:  # it has already exited
                self._handles.append(None)

    def subset(self, ranks: Sequence[int]) -> Peers:
        """Return some of them, to be closed separately."""
        return Peers([self._world_ranks[rank] for rank in ranks], [self._processes[rank] for rank in ranks])

    def __len__(self) -> int:
        return len(self._processes)

    def world_rank(self, rank: int) -> int:
        """Return the world rank of a rank of this host."""
        return self._world_ranks[rank]

    def process(self, rank: int) -> int:
        """Return the process id of a rank of this host."""
        return self._processes[rank]

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of ``rank`` has exited."""
        if not self._handles:
            return False
        handle = self._handles[rank]
        if handle is None:
            return True
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the descriptors."""
        for handle in self._handles:
            if handle is not None:
                os.close(handle)
        self._handles.clear()


# -- status polls --------------------------------------------------------------------------------------

POLL_ANSWER_SECONDS = 2.0
"""How long ranks may take to answer."""
POLL_ANSWER_SECONDS_PER_RANK = 4e-4
"""... and how much longer for each: one server carries all answers."""
POLL_PAUSE_SECONDS = 2e-5
"""How long to wait for each missing answer before the answers are read again."""
MOST_PROBED = 8
"""How many silent ranks one rank probes."""


def poll_ranks(
    store: Store,
    world_size: int,
    *,
    exchange: str = "",
    sequence: int = 0,
    stacks: str,
    awaited: Collection[int] | None = None,
    first: int = 1,
) -> Answers:
    """Ask every rank what it is doing; ranks that do not answer are absent from the result.

    Waits only for the answers of ``awaited``, by default of all. ``exchange``, ``sequence`` and ``stacks`` are as in
    :class:`rankwise.health.event_log.StatusPoll`. The event log is full below ``first``.
    """
    number = store.add("rankwise/roll_calls", 1)
    post(store, StatusPoll(number, exchange, sequence, stacks), first)
    deadline = time.monotonic() + POLL_ANSWER_SECONDS + world_size * POLL_ANSWER_SECONDS_PER_RANK
    answers: Answers = {}
    pending = set(range(world_size))
    essential = pending if awaited is None else set(awaited)
    while True:
        keys = {_answer_key(number, other): other for other in sorted(pending)}
        for key, given in store.peek_all(list(keys)).items():
            answers[keys[key]] = json.loads(given)
        pending -= set(answers)
        if not essential & pending or time.monotonic() > deadline:
            return answers
        # The store's own wait would print a line on stderr for each rank that does not answer.
        time.sleep(max(0.01, POLL_PAUSE_SECONDS * len(pending)))


def answer_poll(store: Store, poll: StatusPoll, rank: int, situation: dict[str, Any]) -> None:
    """Answer a status poll."""
    store.set(_answer_key(poll.number, rank), json.dumps(situation))


def introduce(store: Store, rank: int, process: Process) -> None:
    """Publish which process this rank is, for when it cannot answer itself."""
    store.set(_process_key(rank), json.dumps(asdict(process)))


def withdraw(store: Store, rank: int) -> None:
    """Undo :func:`introduce`: this rank no longer answers, and has not failed."""
    store.delete(_process_key(rank))


def is_introduced(store: Store, rank: int) -> bool:
    """Return whether a rank has joined and not left."""
    return store.check(_process_key(rank))


def process_of(store: Store, rank: int) -> Process | None:
    """Return the process of a rank that has joined and not left."""
    introduced = store.peek(_process_key(rank))
    return None if introduced is None else Process(**json.loads(introduced))


def probe_silent(store: Store, ranks: Iterable[int]) -> Answers:
    """Probe from outside those silent ranks that run on this host, and return what is found."""
    here = this_process()
    found: Answers = {}
    for rank in list(ranks):
        if len(found) == MOST_PROBED:
            break
        process = process_of(store, rank)
        if process is not None and process.host and process.host == here.host:
            state, stack = state_of(process.pid), stack_of(process.pid, process.stack_file)
            found[rank] = {"silent": state, "stack": stack}
    return found


def _answer_key(number: int, rank: int) -> str:
    return f"rankwise/roll_calls/{number}/{rank}"


def _process_key(rank: int) -> str:
    return f"rankwise/processes/{rank}"
