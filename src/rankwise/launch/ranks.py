# SPDX-License-Identifier: Apache-2.0
"""The ranks of this machine in one attempt: started through the warm server, heard of, ended.

Knows no other machine and decides nothing: it notes how each rank failed or ended. Imported by the agent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise import last_call, places, silent
from rankwise.environments import slurm_variables_for, variables_for
from rankwise.launch import alone, failure, script_end
from rankwise.launch.memory import OomCount
from rankwise.launch.output import descriptors_closed
from rankwise.launch.server import Ended, RankStart, Started
from rankwise.stopping import STOPPED_EXIT_CODE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.launch.failure import Failure
    from rankwise.launch.output import Output
    from rankwise.launch.server import WarmServer
    from rankwise.launch.torch_store import Master

LONGEST_LINE = 2000
"""How much is shown of a line that a failed rank wrote."""
KILLED = "had to be killed by the launcher"
FOR_RESTART = "ended by the launcher, to start anew"
"""How a rank ended, in words: after it had been given time to end by itself, and without."""

FLUSH_FAILED = 120
"""Exit code of Python where the last flush of stdout fails."""
STOPPED_SECONDS = 6.0
"""After how long a rank that somebody stopped (SIGSTOP) is spoken of, and where it can be, replaced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where this machine's ranks stand in one attempt."""

    run_id: str
    attempt: int
    first_rank: int
    world_size: int
    node_rank: int
    num_nodes: int
    ranks_per_node: Sequence[int]
    master: Master | None = None
    """Torch's store, for scripts that look for it; ``None`` where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFacts:
    """What every rank of every attempt is told alike."""

    folder: str
    """Temporary, for what ranks write down about their own end."""
    store: tuple[str, int]
    secret: str = field(repr=False)
    interface: str | None
    check: bool
    guard: bool = False
    max_restarts: int = 0


class LocalRanks:
    """Starts, hears and ends the ranks of this machine."""

    def __init__(self, num_ranks: int, facts: JobFacts, *, server: WarmServer, output: Output, doorbell: int) -> None:
        self.num_ranks = num_ranks
        self.running: set[int] = set()
        self.failures: dict[int, Failure] = {}
        self.processes: dict[int, int] = {}
        """Process number of each rank that has been started."""
        self.has_stopped = False
        """Whether a rank saved and ended because it was asked to."""
        self.layout: Layout | None = None
        self.facts = facts
        self._server = server
        self._output = output
        self._doorbell = doorbell
        self._oom_count = OomCount()
        self._ends: dict[int, str] = {}
        self._unheard: list[Failure | int] = []
        self._still_since: dict[int, float] = {}
        self._stood_at: dict[int, str] = {}

    def start(self, layout: Layout, between: Callable[[], None] = lambda: None) -> None:
        """Start the ranks of an attempt; those of the one before are gone.

        Args:
            layout: of the attempt.
            between: called while this waits for the server.
        """
        self.layout = layout
        self.failures, self.processes, self._ends, self._still_since = {}, {}, {}, {}
        self._stood_at = {}
        self.has_stopped = False
        for local_rank in range(self.num_ranks):
            rank = layout.first_rank + local_rank
            variables = self._variables(layout, local_rank)
            streams = self._output.open_rank(rank, layout.world_size, layout.attempt)
            self._server.start(RankStart(rank=rank, attempt=layout.attempt, variables=variables), streams)
            descriptors_closed(streams)
            self.running.add(rank)
            self._hear_of_start(rank, between)

    def _hear_of_start(self, rank: int, between: Callable[[], None]) -> None:
        """Return when a rank is there: asking on and on without hearing would block both ends."""
        while rank not in self.processes:
            said = self._server.hear(between)
            if isinstance(said, Started):
                self.processes[said.rank] = said.pid
            elif isinstance(said, Ended):
                self._unheard += self._note_end(said)

    def sources(self) -> list[int]:
        """Return the descriptors that are readable when there is something to hear."""
        return [self._server.fileno(), self._doorbell]

    def hear(self, readable: list[int]) -> list[Failure | int]:
        """Take in what ranks said: failures that are new, and numbers of ranks that ended well while others run."""
        heard, self._unheard = self._unheard, []
        if self._doorbell in readable:
            os.read(self._doorbell, 4096)
            for rank in sorted(self.running):
                heard += self._note_word(rank)
        if self._server.fileno() in readable:
            said = self._server.hear()
            if isinstance(said, Ended):
                heard += self._note_end(said)
            elif isinstance(said, Started):
                self.processes[said.rank] = said.pid
        return heard

    def look_for_stopped(self, now: float, *, may_end: bool) -> list[tuple[Failure, int]]:
        """Return the ranks that have newly been stopped for a while, with their process numbers.

        Args:
            now: seconds of the monotonic clock.
            may_end: count them as failed; otherwise they are only told of, once.
        """
        found: list[tuple[Failure, int]] = []
        for rank, pid in self.processes.items():
            if rank not in self.running or not _is_stopped(pid):
                self._still_since.pop(rank, None)
                continue
            since = self._still_since.setdefault(rank, now)
            if now - since < STOPPED_SECONDS or rank in self.failures:
                continue
            self._still_since[rank] = float("inf")
            failed = failure.from_stop(rank, now - since, time.time())
            if may_end:
                self.failures[rank] = failed
            found.append((failed, pid))
        return found

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to every rank that runs."""
        for rank in self.running:
            self._ends.setdefault(rank, f"had to be ended by the launcher{self._at(rank)}")
            with contextlib.suppress(OSError):
                self._server.signal(rank, number)

    def clear(self, how: str = KILLED) -> None:
        """Kill the ranks and all they have started; returns when they are gone.

        Args:
            how: what is said of the ranks that ran until now.
        """
        for rank in self.running:
            self._ends.setdefault(rank, how + self._at(rank))
        self._server.clear()
        while True:
            said = self._server.hear(self._server.wake)
            if said == "cleared":
                break
            if isinstance(said, Ended):
                self._note_end(said)
        self.running.clear()

    def look_where_they_are(self) -> None:
        """Find out where the ranks are that run, for when they have to be ended. Returns at once."""
        files, attempt = self.stack_files(), self.layout
        for rank, pid in self.running_processes().items():

            def look(rank: int = rank, pid: int = pid) -> None:
                stack = silent.stack_of(pid, files[rank], partial(self.send_signal, rank))
                if stack and self.layout is attempt:
                    self._stood_at[rank] = places.innermost_of_user(stack)

            threading.Thread(target=look, name="rankwise-look", daemon=True).start()

    def _at(self, rank: int) -> str:
        return f", at {self._stood_at[rank]}" if rank in self._stood_at else ""

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal to one rank; nothing happens where it has ended. May be called from any thread."""
        with contextlib.suppress(OSError):
            self._server.signal(rank, number)

    def kill(self, rank: int) -> None:
        """Kill one rank, where it still runs; what it has started goes with the attempt."""
        if rank in self.running:
            self._ends.setdefault(rank, KILLED)
            self.send_signal(rank, signal.SIGKILL)

    def running_processes(self) -> dict[int, int]:
        """Return the process number of each rank that runs. May be called from any thread."""
        return {rank: pid for rank, pid in self.processes.items() if rank in self.running}

    def is_script_over(self, rank: int) -> bool:
        """Return whether the script of a rank has run to its end, though its process may not have ended."""
        return Path(script_end.note_of(self._error_file(rank))).exists()

    def stack_files(self) -> dict[int, str]:
        """Return where each rank of the attempt writes its stack when it is asked for it."""
        attempt = self.layout.attempt if self.layout is not None else 0
        return {rank: self._stack_file(attempt, rank) for rank in self.processes}

    def report(self) -> dict[str, Any]:
        """Return how the ranks of the attempt ended, as JSON can carry it."""
        if self.layout is None:
            return {"failures": [], "ends": {}, "tails": {}, "logs": {}, "has_stopped": False, "is_alone": False}
        attempt, first = self.layout.attempt, self.layout.first_rank
        self._output.drain()
        self._explain_broken_pipes(self._output.problem())
        for failed in self.failures.values():
            self._output.append_to_log(failed.rank, attempt, failed.traceback)
        logs = {rank: self._output.log_path(rank, attempt) for rank in self.failures}
        return {
            "failures": [failure.to_dict(failed) for failed in self.failures.values()],
            "ends": {
                rank: self._ends.get(rank, "ended with exit code 0") for rank in range(first, first + self.num_ranks)
            },
            "tails": {rank: [line[:LONGEST_LINE] for line in self._output.stderr_tail(rank)] for rank in self.failures},
            "logs": {rank: path for rank, path in logs.items() if path is not None},
            "has_stopped": self.has_stopped,
            "is_alone": Path(alone.note_of(self._error_file(0))).exists(),
        }

    def _explain_broken_pipes(self, problem: str) -> None:
        """Have failures say what a rank could not know: the disk is full behind the pipe that it writes to."""
        for rank, failed in self.failures.items() if problem else ():
            if failed.type == "BrokenPipeError" or failed.exit_code == FLUSH_FAILED:
                self.failures[rank] = replace(failed, how=f"could not write its output: {problem}")

    # -- how a rank ends ---------------------------------------------------------------------------

    def _note_word(self, rank: int) -> list[Failure | int]:
        """Take in what a rank has written of its failure."""
        if rank in self.failures:
            return []
        written = failure.read(self._error_file(rank))
        if written is None:
            return []
        self.failures[rank] = written
        return [written]

    def _note_end(self, ended: Ended) -> list[Failure | int]:
        rank = ended.rank
        if self.layout is None or ended.attempt != self.layout.attempt or rank not in self.running:
            return []
        self.running.discard(rank)
        if ended.exit_code == STOPPED_EXIT_CODE:
            self.has_stopped = True
            self._ends[rank] = "saved and stopped"
            return [rank]
        heard = self._note_word(rank)
        if rank in self.failures:
            if rank not in self._ends and ended.exit_code:
                self.failures[rank] = replace(self.failures[rank], exit_code=ended.exit_code)
        elif rank in self._ends:
            return heard
        elif ended.exit_code:
            killed = ended.exit_code == -signal.SIGKILL
            out_of_memory = self._oom_count.has_risen() if killed else None
            at = last_call.read(last_call.path_beside(self._stack_file(self.layout.attempt, rank)), ended.time)
            self.failures[rank] = failure.from_exit(
                rank, ended.exit_code, ended.time, out_of_memory=out_of_memory, at=at
            )
            heard.append(self.failures[rank])
        elif self.running or self.layout.num_nodes > 1:
            heard.append(rank)
        return heard

    # -- what a rank is told -----------------------------------------------------------------------

    def _error_file(self, rank: int) -> str:
        number = self.layout.attempt if self.layout is not None else 0
        return str(Path(self.facts.folder) / f"attempt-{number}-rank-{rank}.json")

    def _torch_error_file(self, rank: int) -> str:
        number = self.layout.attempt if self.layout is not None else 0
        return str(Path(self.facts.folder) / f"torch-attempt-{number}-rank-{rank}.json")

    def _stack_file(self, attempt: int, rank: int) -> str:
        return str(Path(self.facts.folder) / f"stack-attempt-{attempt}-rank-{rank}.txt")

    def _variables(self, layout: Layout, local_rank: int) -> dict[str, str]:
        rank = layout.first_rank + local_rank
        own = variables_for(
            rank=rank,
            world_size=layout.world_size,
            local_rank=local_rank,
            local_world_size=self.num_ranks,
            node_rank=layout.node_rank,
            num_nodes=layout.num_nodes,
            ranks_per_node=layout.ranks_per_node,
            store=self.facts.store,
            master=None if layout.master is None else layout.master.address,
            master_is_served=layout.master is not None and layout.master.is_served,
            run_id=layout.run_id,
            attempt=str(layout.attempt),
            error_file=self._error_file(rank),
            stack_file=self._stack_file(layout.attempt, rank),
            torch_error_file=self._torch_error_file(rank),
            max_restarts=self.facts.max_restarts,
            secret=self.facts.secret,
            interface=self.facts.interface,
            check=self.facts.check,
            guard=self.facts.guard,
        )
        return own | slurm_variables_for(
            rank=rank, local_rank=local_rank, node_rank=layout.node_rank, ranks_per_node=layout.ranks_per_node
        )


def _is_stopped(pid: int) -> bool:
    """Return whether somebody stopped a process; a debugger's stop is another state. Source: proc_pid_stat(5)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] == "T"
