# SPDX-License-Identifier: Apache-2.0
"""Supervises the ranks of one machine: torch elastic's agent over ranks that the warm server forks.

Tells the other ranks of a failure, gives them time to end with it, ends the rest, and starts the
next attempt where one is left. Never prints. Imported by the launcher's start.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerState
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from rankwise.environments import variables_for
from rankwise.events import post_departure, post_failure
from rankwise.launch import failure
from rankwise.launch.failure import FailedAttempt, Failure
from rankwise.launch.output import descriptors_closed
from rankwise.launch.server import Ended, RankStart

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec

    from rankwise.launch.interrupts import Interrupts
    from rankwise.launch.local import LocalRendezvous
    from rankwise.launch.output import Output
    from rankwise.launch.server import WarmServer

PEERS_SECONDS = 5.0
"""How long the other ranks have to end by themselves once they have been told of a failure."""
STOP_SECONDS = 3.0
"""How long ranks have to end after Ctrl-C or SIGTERM."""
TERMINATE_SECONDS = 1.0
"""How long a rank has to end between SIGTERM and SIGKILL, after another's failure."""
LOOK_SECONDS = 1.0
"""How often the agent lets torch elastic look for other machines. Ends are heard of at once."""


class LocalAgent(SimpleElasticAgent):  # pyright: ignore[reportUntypedBaseClass]
    """Starts, watches and stops the ranks of this machine, attempt after attempt."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        rendezvous: LocalRendezvous,
        server: WarmServer,
        output: Output,
        interrupts: Interrupts,
        error_folder: str,
        doorbell: int,
        on_failed_attempt: Callable[[FailedAttempt], None],
    ) -> None:
        super().__init__(spec)
        self._rendezvous_value = rendezvous
        self._server = server
        self._output = output
        self._interrupts = interrupts
        self._error_folder = Path(error_folder)
        self._doorbell = doorbell
        self._on_failed_attempt = on_failed_attempt
        self._world_size = 0
        self._running: set[int] = set()
        self._failures: dict[int, Failure] = {}
        self._stopped: dict[int, str] = {}
        self._failed_attempt: FailedAttempt | None = None

    def supervise(self) -> FailedAttempt | None:
        """Start the ranks, and again where restarts are left, and return when none is left.

        Returns:
            The last attempt, where it failed.

        Raises:
            SignalException: a signal has ended the ranks.
        """
        self.run()  # pyright: ignore[reportUnknownMemberType]
        return self._failed_attempt

    # -- what torch elastic calls ------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._failures, self._stopped, self._failed_attempt = {}, {}, None
        attempt = self._rendezvous_value.attempt
        for worker in worker_group.workers:
            rank = worker.global_rank
            self._world_size = worker.world_size
            variables = self._variables(worker_group, worker.local_rank, rank)
            streams = self._output.open_rank(rank, attempt)
            self._server.start(RankStart(rank=rank, attempt=attempt, variables=variables), streams)
            descriptors_closed(streams)
            self._running.add(rank)
        return {worker.local_rank: worker.global_rank for worker in worker_group.workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._hear(time.monotonic() + LOOK_SECONDS)
        if self._failures:
            self._settle()
            self._failed_attempt = self._conclude()
            self._on_failed_attempt(self._failed_attempt)
            process_failures = {
                rank: ProcessFailure(rank, 0, failed.exit_code, self._error_file(rank))
                for rank, failed in self._failures.items()
            }
            return RunResult(state=WorkerState.FAILED, failures=process_failures)
        if self._running:
            return RunResult(state=WorkerState.HEALTHY)
        values = {worker.global_rank: None for worker in worker_group.workers}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002 - torch's
        """Kill whatever the attempt has left, so that the next one starts alone."""
        self._clear()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End the ranks: politely, then, or at a second signal, not."""
        self._signal_all(death_sig)
        deadline = time.monotonic() + min(timeout, STOP_SECONDS)
        with contextlib.suppress(SignalException):
            while self._running and time.monotonic() < deadline:
                self._hear(deadline)
        self._clear()
        self._rendezvous_value.shutdown()

    def _construct_event(self, state: str, source: EventSource, *_: object, **__: object) -> Event:
        # torch's own looks up the machine's full name each time: many seconds without DNS.
        return Event(f"torchelastic.worker.status.{state}", source=source, metadata={})

    # -- hearing -----------------------------------------------------------------------------------

    def _hear(self, deadline: float) -> None:
        """Wait until a rank has ended or left word, a signal has come, or it is too late."""
        sources = [self._server.fileno(), self._doorbell, self._interrupts.fileno()]
        if not self._running:
            return
        readable, _, _ = select.select(sources, [], [], max(0.0, deadline - time.monotonic()))
        if self._interrupts.fileno() in readable:
            number = self._interrupts.take()
            raise SignalException(f"received {number.name}", number)
        if self._doorbell in readable:
            os.read(self._doorbell, 4096)
            for rank in list(self._running):
                self._note_word(rank)
        if self._server.fileno() in readable:
            said = self._server.hear()
            if isinstance(said, Ended):
                self._note_end(said)

    def _note_word(self, rank: int) -> None:
        """Take in what a rank has written of its failure, and tell the others."""
        written = failure.read(self._error_file(rank))
        if written is not None and rank not in self._failures:
            self._failures[rank] = written
            self._tell_peers(written)

    def _note_end(self, ended: Ended) -> None:
        rank = ended.rank
        if ended.attempt != self._rendezvous_value.attempt or rank not in self._running:
            return
        self._running.discard(rank)
        self._note_word(rank)
        if rank in self._failures:
            if rank not in self._stopped and ended.exit_code:
                self._failures[rank] = replace(self._failures[rank], exit_code=ended.exit_code)
        elif rank in self._stopped:
            return
        elif ended.exit_code:
            self._failures[rank] = failure.from_exit(rank, ended.exit_code, ended.time)
            self._tell_peers(self._failures[rank])
        elif self._running:
            self._post(post_departure, rank=rank, exit_code=0)

    def _tell_peers(self, failed: Failure) -> None:
        if failed.secondary or not self._running - {failed.rank}:
            return
        text = failed.traceback or f"the process ended with exit code {failed.exit_code}"
        self._post(
            post_failure,
            rank=failed.rank,
            error_type=failed.type,
            text=text,
            hostname=socket.gethostname(),
        )

    def _post(self, post: Callable[..., None], **event: Any) -> None:  # noqa: ANN401
        store = self._rendezvous_value.store
        if store is None:
            return
        # A script may do what it likes to the store; the launcher still has ranks to end.
        with contextlib.suppress(OSError, RuntimeError):
            post(store.prefixed(f"attempt/{self._rendezvous_value.attempt}"), **event)

    # -- ending ------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Let the other ranks end by themselves, then end them."""
        self._hear_until_ended(PEERS_SECONDS)
        self._signal_all(signal.SIGTERM)
        self._hear_until_ended(TERMINATE_SECONDS)
        self._clear()

    def _hear_until_ended(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._running and time.monotonic() < deadline:
            self._hear(deadline)

    def _signal_all(self, number: signal.Signals) -> None:
        for rank in self._running:
            self._stopped.setdefault(rank, "had to be ended by the launcher")
            with contextlib.suppress(OSError):
                self._server.signal(rank, number)

    def _clear(self) -> None:
        """Kill the ranks and all they have started; returns when they are gone."""
        for rank in self._running:
            self._stopped.setdefault(rank, "had to be killed by the launcher")
        self._server.clear()
        while True:
            said = self._server.hear()
            if not isinstance(said, Ended):
                break
            self._note_end(said)
        self._running.clear()

    def _conclude(self) -> FailedAttempt:
        ends = {
            rank: self._stopped.get(rank, "ended with exit code 0")
            for rank in range(self._world_size)
            if rank not in self._failures
        }
        return FailedAttempt(
            attempt=self._rendezvous_value.attempt,
            world_size=self._world_size,
            failures=failure.by_blame(self._failures.values()),
            ends=ends,
        )

    # -- what a rank is told -----------------------------------------------------------------------

    def _error_file(self, rank: int) -> str:
        return str(self._error_folder / f"attempt-{self._rendezvous_value.attempt}-rank-{rank}.json")

    def _variables(self, group: WorkerGroup, local_rank: int, rank: int) -> dict[str, str]:
        return variables_for(
            rank=rank,
            world_size=self._world_size,
            local_rank=local_rank,
            local_world_size=group.spec.local_world_size,
            node_rank=int(group.group_rank or 0),
            num_nodes=int(group.group_world_size or 1),
            store=(str(group.master_addr), int(group.master_port or 0)),
            run_id=group.spec.rdzv_handler.get_run_id(),
            attempt=str(self._rendezvous_value.attempt),
            error_file=self._error_file(rank),
        )
