# SPDX-License-Identifier: Apache-2.0
"""Ranks that keep running after others have exited without an error: which ones, and what they do, reported once each.

A rank that still works (rank 0 saves) and a rank that waits for one that has exited cannot be told apart by exit codes;
the difference is whether they compute, read or write. Terminates nothing. Imported by the agent.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.errors import LaunchError, RankwiseError, fold_ranks
from rankwise.health import diagnosis
from rankwise.health.call_site import innermost_of_user
from rankwise.health.collective_timeout import NOTICE_SECONDS
from rankwise.world.processes import all_stats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rankwise.health.diagnosis import Answers

_WAITS = (
    "if it waits for a rank that has exited, have all ranks join and call the same collectives before they exit. "
    "The job is not terminated: press Ctrl-C to end it; `rankwise stacks` shows the rank again"
)
_CANNOT_END = (
    "release what keeps it alive at the end of the script: call torch.distributed.destroy_process_group() before the "
    "model is freed, stop threads, and call no collectives in exit handlers. Press Ctrl-C to end the job"
)
_IS_OVER = "its script has run to the end, but its process does not exit: an exit handler, a thread or a destructor"
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
    """Return the activity of each rank, by process id, including its process group: loader workers, and others."""
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


class Stragglers:
    """The ranks of this machine that keep running, in one attempt.

    Args:
        ask: returns what ranks are doing; takes seconds, and is called from another thread.
        is_over: returns whether a rank's script has run to its end.
    """

    def __init__(self, ask: Callable[[], Answers], is_over: Callable[[int], bool]) -> None:
        self._ask = ask
        self._is_over = is_over
        self._ended: set[int] = set()
        self._since = 0.0
        self._before: dict[int, Activity] | None = None
        self._measured_at = 0.0
        self._reported_busy: set[int] = set()
        self._reported_idle: set[int] = set()
        self._idle: dict[int, Activity] = {}
        self._busy: dict[int, Activity] = {}
        self._answers: queue.SimpleQueue[Answers] = queue.SimpleQueue()

    def note_ended(self, ranks: Sequence[int], now: float) -> None:
        """Record which ranks of the job have exited without an error."""
        if not self._ended.issuperset(ranks):
            self._ended.update(ranks)
            self._since, self._before = now, None

    def notices(self, running: Mapping[int, int], now: float) -> str:
        """Return the text to show now, usually empty; ``running`` has the process id of each running rank here."""
        if not self._ended or not running:
            return ""
        if not self._answers.empty():
            return self._notices_of(self._answers.get(), set(running), now)
        awaited = set(running) - self._reported_idle
        if not awaited or self._idle or self._busy:
            return ""
        if self._before is None:
            self._before, self._measured_at = activity_of(list(running.values())), now
        elif now - self._measured_at >= NOTICE_SECONDS:
            self._judge({rank: running[rank] for rank in awaited}, now)
        return ""

    def _judge(self, running: Mapping[int, int], now: float) -> None:
        """Determine which ranks make no progress, and inspect those not reported yet."""
        before, seconds = self._before or {}, now - self._measured_at
        after = activity_of(list(running.values()))
        self._before, self._measured_at = after, now
        for rank, pid in running.items():
            used = after[pid].since(before.get(pid, after[pid]))
            if used.is_idle(seconds):
                self._idle[rank] = used
            elif rank not in self._reported_busy:
                self._busy[rank] = used
        if self._idle or self._busy:
            threading.Thread(target=self._ask_ranks, name="rankwise-stragglers", daemon=True).start()

    def _ask_ranks(self) -> None:
        try:
            self._answers.put(self._ask())
        except (RankwiseError, OSError, RuntimeError, ValueError):  # the store is busy, or has just closed
            self._answers.put({})

    def _notices_of(self, answers: Answers, running: set[int], now: float) -> str:
        """Return the report on the inspected ranks that still run."""
        idle = {rank: used for rank, used in self._idle.items() if rank in running}
        busy = {rank: used for rank, used in self._busy.items() if rank in running}
        self._reported_idle.update(idle)
        self._reported_busy.update(busy)
        self._idle, self._busy = {}, {}
        after = f"{now - self._since:.0f} s after {fold_ranks(sorted(self._ended))} exited without an error"
        lines: list[str] = []
        for rank, used in sorted(busy.items()):
            lines.append(f"[rankwise] rank {rank} still works, {after}: {_used(used)}{_where(answers.get(rank))}\n")
        if idle:
            lines.append(f"[rankwise] {self._notice(idle, after, answers)}\n")
        return "".join(lines)

    def _notice(self, idle: Mapping[int, Activity], after: str, answers: Answers) -> LaunchError:
        known: Answers = {rank: answers.get(rank, {"silent": "cannot be queried now"}) for rank in idle}
        known |= {rank: {"silent": "exited without an error"} for rank in self._ended}
        evidence = [diagnosis.table(known, among=known), diagnosis.stacks(known, idle, is_wanted_of_all=True)]
        over = [rank for rank in sorted(idle) if self._is_over(rank)]
        if over:
            evidence.append(f"{fold_ranks(over)}: {_IS_OVER}")
        who = fold_ranks(sorted(idle))
        runs, makes = ("runs", "makes") if len(idle) == 1 else ("run", "make")
        return LaunchError(
            f"{who} still {runs}, {after}, and {makes} no progress.",
            evidence="\n".join(filter(None, evidence)),
            do=_CANNOT_END if len(over) == len(idle) else _WAITS,
        )


def _used(used: Activity) -> str:
    megabytes = used.num_bytes / 2**20
    return f"{used.cpu_seconds:.1f} s of CPU time and {megabytes:.0f} MB read and written in {NOTICE_SECONDS:.0f} s"


def _where(answer: Mapping[str, Any] | None) -> str:
    stack = (answer or {}).get("stack")
    at = (answer or {}).get("at") or (innermost_of_user(stack) if stack else "")
    return f", at {at}" if at else ""
