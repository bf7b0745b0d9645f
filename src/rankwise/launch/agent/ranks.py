# SPDX-License-Identifier: Apache-2.0
"""The ranks of this machine in one attempt: started through the fork server, monitored, terminated.

Does not know other machines and decides nothing: it records how each rank failed or exited. Imported by the agent.
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
from typing import TYPE_CHECKING

from rankwise.health import call_site, flight_recorder, process_probe
from rankwise.health.preemption import STOPPED_EXIT_CODE
from rankwise.launch.agent.output import descriptors_closed
from rankwise.launch.messages import RankEnds, RankExited, RanksCleared, RankStart, RankStarted, StartAttempt
from rankwise.launch.report import failure
from rankwise.launch.report.exit_code import OomCount
from rankwise.launch.report.failure import Failure
from rankwise.launch.report.failure_report import launcher_name
from rankwise.meter import SUFFIX, record_path
from rankwise.world.device.kinds import variables_for_instance
from rankwise.world.environments.process import REPORT_OFF, slurm_variables_for
from rankwise.world.environments.rankwise import echo_note, variables_for
from rankwise.world.environments.reading import parse_counts
from rankwise.world.processes import stat_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.launch.agent.output import Output
    from rankwise.launch.fork_server.fork_server import ForkServer
    from rankwise.launch.options import LaunchOptions
    from rankwise.launch.rendezvous import JobAddress

LONGEST_LINE = 2000
"""How much of a line written by a failed rank is shown."""
KILLED = "had to be killed by the launcher"
FOR_RESTART = "terminated by the launcher for a restart"
"""How a rank exited, in words: after it had been given time to exit by itself, and without."""

FLUSH_FAILED = 120
"""Exit code of Python if the last flush of stdout fails."""
STOPPED_SECONDS = 6.0
"""After how long a stopped rank (SIGSTOP) is reported and, if possible, replaced."""


@dataclass(slots=True)
class _RanksOfAttempt:
    """What is known of the ranks of one attempt, by rank."""

    processes: dict[int, int] = field(default_factory=dict[int, int])
    """Process id of each rank that has been started."""
    failures: dict[int, Failure] = field(default_factory=dict[int, Failure])
    ends: dict[int, str] = field(default_factory=dict[int, str])
    """How each rank exited that was terminated, or that saved and stopped."""
    unreported: list[Failure | int] = field(default_factory=list["Failure | int"])
    stopped_since: dict[int, float] = field(default_factory=dict[int, float])
    located_at: dict[int, str] = field(default_factory=dict[int, str])
    has_stopped: bool = False


class LocalRanks:
    """Starts, monitors and terminates the ranks of this machine."""

    def __init__(
        self,
        num_ranks: int,
        job: JobAddress,
        options: LaunchOptions,
        *,
        folder: str,
        server: ForkServer,
        output: Output,
        notify_pipe: int,
        instances: Sequence[str] = (),
    ) -> None:
        """Start nothing; ``folder`` is temporary, for the files in which ranks record their own end.

        With ``instances``, each rank is shown one of these MIG instances of NVIDIA GPUs.
        """
        self.num_ranks = num_ranks
        self.running: set[int] = set()
        self.attempt: StartAttempt | None = None
        self.job = job
        self._options = options
        self._folder = folder
        self._server = server
        self._output = output
        self._notify_pipe = notify_pipe
        self._instances = instances
        self._oom_count = OomCount()
        self._known = _RanksOfAttempt()

    @property
    def failures(self) -> dict[int, Failure]:
        """How ranks of the attempt have failed."""
        return self._known.failures

    @property
    def has_stopped(self) -> bool:
        """Whether a rank saved and exited because it was asked to."""
        return self._known.has_stopped

    def start(self, attempt: StartAttempt, between: Callable[[], None] = lambda: None) -> None:
        """Start the ranks of an attempt, after those of the previous one; ``between`` is called while this waits."""
        self.attempt = attempt
        self._known = _RanksOfAttempt()
        ranks_per_node = parse_counts(attempt.ranks_per_node, "ranks_per_node")
        for local_rank in range(self.num_ranks):
            rank = attempt.first_rank + local_rank
            variables = self._variables(attempt, local_rank, ranks_per_node)
            streams = self._output.open_rank(rank, attempt.world_size, attempt.attempt)
            self._server.start(RankStart(rank=rank, attempt=attempt.attempt, variables=variables), streams)
            descriptors_closed(streams)
            self.running.add(rank)
            self._wait_until_started(rank, between)

    def _wait_until_started(self, rank: int, between: Callable[[], None]) -> None:
        """Wait until a rank is started: sending more and more without receiving would block both ends."""
        while rank not in self._known.processes:
            self._known.unreported += self._note(self._server.receive(between))

    def sources(self) -> list[int]:
        """Return the descriptors that are readable when there is news of ranks."""
        return [self._server.fileno(), self._notify_pipe]

    def receive(self, readable: list[int]) -> list[Failure | int]:
        """Return new reports: failures, and numbers of ranks that exited without an error while others run."""
        news, self._known.unreported = self._known.unreported, []
        if self._notify_pipe in readable:
            os.read(self._notify_pipe, 4096)
            for rank in sorted(self.running):
                news += self._read_failure(rank)
        if self._server.fileno() in readable:
            news += self._note(self._server.receive())
        return news

    def find_stopped(self, now: float, *, may_end: bool) -> list[tuple[Failure, int]]:
        """Return the ranks newly found to have been stopped for a while, with their process ids.

        With ``may_end`` they count as failed; otherwise they are only reported, once.
        """
        found: list[tuple[Failure, int]] = []
        for rank, pid in self._known.processes.items():
            if rank not in self.running or not _is_stopped(pid):
                self._known.stopped_since.pop(rank, None)
                continue
            since = self._known.stopped_since.setdefault(rank, now)
            if now - since < STOPPED_SECONDS or rank in self.failures:
                continue
            self._known.stopped_since[rank] = float("inf")
            failed = failure.from_stop(rank, now - since, time.time())
            if may_end:
                self.failures[rank] = failed
            found.append((failed, pid))
        return found

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to every rank that runs."""
        for rank in self.running:
            self._known.ends.setdefault(rank, f"had to be terminated by the launcher{self._at(rank)}")
            with contextlib.suppress(OSError):
                self._server.signal(rank, number)

    def clear(self, how: str = KILLED) -> None:
        """Kill the ranks and everything they started, and wait; ``how`` describes ranks that were still running."""
        for rank in self.running:
            self._known.ends.setdefault(rank, how + self._at(rank))
        self._server.clear()
        while not isinstance(message := self._server.receive(self._server.wake), RanksCleared):
            self._note(message)
        self.running.clear()

    def locate(self) -> None:
        """Determine where the running ranks are, before they are terminated. Returns at once."""
        files, known = self.stack_files(), self._known
        for rank, pid in self.running_processes().items():

            def locate_one(rank: int = rank, pid: int = pid) -> None:
                stack = process_probe.stack_of(pid, files[rank], partial(self.send_signal, rank))
                if stack:
                    known.located_at[rank] = call_site.innermost_of_user(stack)

            threading.Thread(target=locate_one, name="rankwise-locate", daemon=True).start()

    def _at(self, rank: int) -> str:
        return f", at {self._known.located_at[rank]}" if rank in self._known.located_at else ""

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal to one rank; does nothing if it has exited. May be called from any thread."""
        with contextlib.suppress(OSError):
            self._server.signal(rank, number)

    def kill(self, rank: int) -> None:
        """Kill one rank if it still runs; processes it has started end with the attempt."""
        if rank in self.running:
            self._known.ends.setdefault(rank, KILLED)
            self.send_signal(rank, signal.SIGKILL)

    def running_processes(self) -> dict[int, int]:
        """Return the process id of each running rank. May be called from any thread."""
        return {rank: pid for rank, pid in list(self._known.processes.items()) if rank in self.running}

    def is_script_over(self, rank: int) -> bool:
        """Return whether the script of a rank has run to its end, though its process may still run."""
        return Path(failure.script_end_note(self._error_file(rank))).exists()

    def stack_files(self) -> dict[int, str]:
        """Return where each rank of the attempt writes its stack on request. May be called from any thread."""
        return {rank: failure.stack_file(self._folder, self._number, rank) for rank in list(self._known.processes)}

    def step_records(self) -> dict[int, Path]:
        """Return where each rank of the attempt records its steps. May be called from any thread."""
        folder, job = self._options.report, "" if self.attempt is None else self.attempt.run_id
        if folder is None or folder == REPORT_OFF:
            return {rank: Path(f"{path}{SUFFIX}") for rank, path in self.stack_files().items()}
        return {rank: record_path(Path(folder), job, self._number, rank) for rank in list(self._known.processes)}

    def report(self) -> RankEnds:
        """Return how the ranks of the attempt exited."""
        if self.attempt is None:
            return RankEnds()
        number, first, ends = self._number, self.attempt.first_rank, self._known.ends
        self._output.drain()
        self._explain_broken_pipes(self._output.problem())
        for failed in self.failures.values():
            if self._output.keeps_logs:
                self._output.append_to_log(failed.rank, number, failed.traceback)
        paths = {rank: self._output.log_path(rank, number) for rank in self.failures}
        return RankEnds(
            failures=tuple(self.failures.values()),
            ends={rank: ends.get(rank, "exited with code 0") for rank in range(first, first + self.num_ranks)},
            stderr_tails={
                rank: tuple(line[:LONGEST_LINE] for line in self._output.stderr_tail(rank)) for rank in self.failures
            },
            log_paths={rank: path for rank, path in paths.items() if path is not None},
            has_stopped=self.has_stopped,
            is_alone=Path(failure.alone_note(self._error_file(0))).exists(),
        )

    def _explain_broken_pipes(self, problem: str) -> None:
        """Add to failures what a rank cannot know: the disk behind its output pipe is full."""
        for rank, failed in self.failures.items() if problem else ():
            if failed.type == "BrokenPipeError" or failed.exit_code == FLUSH_FAILED:
                self.failures[rank] = replace(failed, how=f"could not write its output: {problem}")

    # -- how a rank exits --------------------------------------------------------------------------

    def _read_failure(self, rank: int) -> list[Failure | int]:
        if rank in self.failures:
            return []
        written = failure.read(self._error_file(rank))
        if written is None:
            return []
        self.failures[rank] = written
        return [written]

    def _note(self, message: RankStarted | RankExited | RanksCleared) -> list[Failure | int]:
        """Record a message of the server; return what there is to report."""
        if isinstance(message, RankStarted):
            self._known.processes[message.rank] = message.pid
        return self._note_end(message) if isinstance(message, RankExited) else []

    def _note_end(self, ended: RankExited) -> list[Failure | int]:
        rank = ended.rank
        if self.attempt is None or ended.attempt != self.attempt.attempt or rank not in self.running:
            return []
        self.running.discard(rank)
        if ended.exit_code == STOPPED_EXIT_CODE:
            self._known.has_stopped = True
            self._known.ends[rank] = "saved and stopped"
            return [rank]
        news = self._read_failure(rank)
        if rank in self.failures:
            if rank not in self._known.ends and ended.exit_code:
                self.failures[rank] = replace(self.failures[rank], exit_code=ended.exit_code)
        elif rank in self._known.ends:
            return news
        elif ended.exit_code:
            killed = ended.exit_code == -signal.SIGKILL
            out_of_memory = self._oom_count.has_risen() if killed else None
            file = failure.stack_file(self._folder, self._number, rank)
            at = flight_recorder.read_last_collective(flight_recorder.last_collective_path(file), ended.time)
            is_echo = Path(echo_note(self._error_file(rank))).exists()
            self.failures[rank] = failure.from_exit(
                rank,
                ended.exit_code,
                ended.time,
                out_of_memory=out_of_memory,
                at=at,
                is_echo=is_echo,
                crash=failure.read_crash(self._error_file(rank)),
            )
            news.append(self.failures[rank])
        elif self.running or self.attempt.num_nodes > 1:
            news.append(rank)
        return news

    # -- the variables of a rank -------------------------------------------------------------------

    @property
    def _number(self) -> int:
        return self.attempt.attempt if self.attempt is not None else 0

    def _error_file(self, rank: int) -> str:
        return failure.error_file(self._folder, self._number, rank)

    def _variables(self, attempt: StartAttempt, local_rank: int, ranks_per_node: Sequence[int]) -> dict[str, str]:
        rank = attempt.first_rank + local_rank
        own = variables_for(
            rank=rank,
            world_size=attempt.world_size,
            local_rank=local_rank,
            local_world_size=self.num_ranks,
            node_rank=attempt.node_rank,
            num_nodes=attempt.num_nodes,
            ranks_per_node=ranks_per_node,
            store=self.job.address,
            master=None if attempt.torch_store is None else attempt.torch_store.address,
            master_is_served=attempt.torch_store is not None and attempt.torch_store.is_served,
            run_id=attempt.run_id,
            attempt=str(attempt.attempt),
            error_file=self._error_file(rank),
            stack_file=failure.stack_file(self._folder, attempt.attempt, rank),
            torch_error_file=failure.torch_error_file(self._folder, attempt.attempt, rank),
            max_restarts=self._options.max_restarts,
            secret=self.job.secret,
            interface=self.job.interface,
            check=self._options.check,
            guard=self._options.guard,
            report=self._options.report,
            launcher=launcher_name(),
        )
        shown = variables_for_instance(self._instances[local_rank]) if self._instances else {}
        return (
            own
            | shown
            | slurm_variables_for(
                rank=rank, local_rank=local_rank, node_rank=attempt.node_rank, ranks_per_node=ranks_per_node
            )
        )


def _is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal; a debugger's stop is another state."""
    stat = stat_of(pid)
    return stat is not None and stat.state == "T"
