# SPDX-License-Identifier: Apache-2.0
"""Supervises this machine's part of a job: executes the coordinator's messages, and reports what happens here.

Prints nothing itself and does not know other machines. Imported by the launcher's start.
"""

from __future__ import annotations

import contextlib
import select
import signal
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rankwise.errors import LaunchError, fold_ranks
from rankwise.health.preemption import STOPPED_EXIT_CODE
from rankwise.launch.agent.inspection import stacks_of
from rankwise.launch.agent.output import StatusLine
from rankwise.launch.agent.ranks import FOR_RESTART, KILLED
from rankwise.launch.agent.signals import Interrupted
from rankwise.launch.agent.stragglers import Stragglers
from rankwise.launch.controller.coordinator import RETURN_SECONDS
from rankwise.launch.controller.link import ControllerLost
from rankwise.launch.inspect.stacks import line_of
from rankwise.launch.messages import (
    EndJob,
    InspectAnswer,
    InspectRequest,
    NodeLeaves,
    RankDeparted,
    RankFailed,
    RanksDeparted,
    RanksEnded,
    Refuse,
    ReportFailure,
    RequestStop,
    ShowText,
    StartAttempt,
    StopAttempt,
    StopRank,
    Wait,
    error_of,
)
from rankwise.launch.report import failure_report
from rankwise.launch.report.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.launch.agent.inspection import InspectService
    from rankwise.launch.agent.ranks import LocalRanks
    from rankwise.launch.agent.signals import PendingSignals
    from rankwise.launch.controller.link import AgentLink
    from rankwise.launch.messages import Message
    from rankwise.launch.options import LaunchOptions
    from rankwise.launch.report.failure import FailedAttempt
    from rankwise.launch.report.failure_report import Reporter

AGENT_POLL_SECONDS = 0.5
"""How often the agent polls for what it is not notified of: silence, stopped processes."""
STOP_SECONDS = 3.0
"""How long ranks may take to exit after Ctrl-C or SIGTERM."""
AGAIN_SECONDS = 1.0
"""How long a machine that was told to wait does so before it introduces itself again."""
PROGRESS_SECONDS = 3.0
"""How often the other machines are asked for the line about the whole job."""
LOST_EXIT_CODE = 1
WHERE_SECONDS = 2.0
"""How long before ranks are asked to exit their location is determined."""
MOST_NAMED_NODES = 16
"""How many machines a line names."""
TERMINATE_SECONDS = 1.0
"""How long a rank may take to exit between SIGTERM and SIGKILL, after another's failure."""


@dataclass(slots=True)
class _Ending:
    """When the ranks that still run are sent SIGTERM, and when they are killed."""

    terminate_at: float
    kill_at: float
    at_once: bool
    """No rank is waited for, since all are restarted."""
    has_asked: bool = False
    has_located: bool = False


class _RunningAttempt:
    """The ranks of this machine in one attempt: whether they make progress, and how they are ended."""

    def __init__(self, ranks: LocalRanks) -> None:
        self._ranks = ranks
        self._stragglers = Stragglers(partial(stacks_of, ranks), ranks.is_script_over)
        self._ending: _Ending | None = None
        self._kill_at: dict[int, float] = {}
        """When ranks that the others continue without are killed, if they have not exited by then."""

    @property
    def is_ending(self) -> bool:
        """Whether all ranks are being ended."""
        return self._ending is not None

    def note_departed(self, ranks: Sequence[int]) -> None:
        """Record which ranks of the job have exited without an error."""
        self._stragglers.note_ended(ranks, time.monotonic())

    def notices(self) -> str:
        """Return what to show of ranks that keep running, usually nothing."""
        return "" if self.is_ending else self._stragglers.notices(self._ranks.running_processes(), time.monotonic())

    def begin_to_end(self, settle_seconds: float) -> None:
        """Have all ranks end; they may exit by themselves for a while."""
        terminate_at = time.monotonic() + settle_seconds
        at_once = not settle_seconds
        kill_at = terminate_at + (0.0 if at_once else TERMINATE_SECONDS)
        self._ending = _Ending(terminate_at, kill_at, at_once, has_asked=at_once)

    def begin_to_end_rank(self, rank: int, settle_seconds: float) -> None:
        """Have one rank end, without which the others continue."""
        self._kill_at[rank] = time.monotonic() + settle_seconds

    def seconds_to_next_action(self) -> float:
        """Return how long the ranks may be left alone."""
        if self._ending is None:
            return AGENT_POLL_SECONDS
        next_action = self._ending.kill_at if self._ending.has_asked else self._ending.terminate_at
        return min(AGENT_POLL_SECONDS, max(0.0, next_action - time.monotonic()))

    def continue_ending(self) -> None:
        """Do what is due now to end ranks."""
        ending, now = self._ending, time.monotonic()
        for rank in [rank for rank, kill_at in self._kill_at.items() if now >= kill_at]:
            del self._kill_at[rank]
            self._ranks.kill(rank)
        if ending is None or not self._ranks.running:
            return
        if not ending.at_once and not ending.has_located and now >= ending.terminate_at - WHERE_SECONDS:
            ending.has_located = True
            self._ranks.locate()
        if not ending.has_asked and now >= ending.terminate_at:
            ending.has_asked = True
            self._ranks.signal_all(signal.SIGTERM)
        elif ending.has_asked and now >= ending.kill_at:
            self._ranks.clear(FOR_RESTART if ending.at_once else KILLED)


class Agent:
    """One machine's part of a job, from the first attempt to the last."""

    def __init__(
        self,
        ranks: LocalRanks,
        *,
        open_link: Callable[[float, Callable[[], None]], AgentLink],
        signals: PendingSignals,
        inspection: InspectService,
        reporter: Reporter,
        hosts_job: bool,
        options: LaunchOptions,
        saves_on_terminate: bool,
        passes_terminate_on: bool,
    ) -> None:
        """Start nothing; ``open_link`` takes its time limit, and what to call meanwhile, which may raise.

        With ``saves_on_terminate``, SIGTERM asks for a stop that saves. With ``passes_terminate_on`` only this process
        receives it (Slurm signals every process of a job): the ranks here get it too, so that those that cannot save
        end, or handle it in their own way.
        """
        self._ranks = ranks
        self._open_link = open_link
        self._signals = signals
        self._inspection = inspection
        self._status = StatusLine(self._describe_job) if options.progress else None
        self._reporter = reporter
        self._hosts_job = hosts_job
        self._options = options
        self._saves_on_terminate = saves_on_terminate
        self._passes_terminate_on = passes_terminate_on
        self._link: AgentLink | None = None
        self._running: _RunningAttempt | None = None
        self._exit_code: int | None = None

    def run(self, timeout_seconds: float) -> int:
        """Take part until the job is over; return its exit code, as a shell reports it.

        Args:
            timeout_seconds: how long to look for the coordinator at first.

        Raises:
            ConfigurationError: the coordinator refused this machine.
            LaunchError: the coordinator cannot be reached, is lost for good, or a rank could not be started.
        """
        try:
            self._link = self._open_link(timeout_seconds, self._raise_if_interrupted)
            return self._take_part()
        except Interrupted as interrupted:
            return self._end_at_once(interrupted.number)
        finally:
            if self._status is not None:
                self._status.close()
            # If the server has exited, so have the ranks, and the reason is being raised.
            with contextlib.suppress(OSError, LaunchError):
                self._ranks.clear()
            if self._link is not None:
                self._link.close()

    def _take_part(self) -> int:
        while self._exit_code is None:
            if self._link is None:
                return LOST_EXIT_CODE
            try:
                self._turn(self._link)
            except ControllerLost as lost:
                self._link = self._reconnect(lost)
        return self._exit_code

    def _raise_if_interrupted(self) -> None:
        """Raise if a signal was received; for waits in which nothing else is noticed."""
        readable, _, _ = select.select([self._signals.fileno()], [], [], 0)
        if readable:
            self._handle_signal(self._signals.next_received())

    # -- one turn of the loop ----------------------------------------------------------------------

    def _turn(self, link: AgentLink) -> None:
        own = self._ranks.sources()
        seconds = AGENT_POLL_SECONDS if self._running is None else self._running.seconds_to_next_action()
        sources = [link, self._inspection, self._signals.fileno(), *own]
        readable, _, _ = select.select(sources, [], [], seconds)
        if self._signals.fileno() in readable:
            self._handle_signal(self._signals.next_received())
        for news in self._ranks.receive([source for source in own if source in readable]):
            self._report_to(link, news)
        if link in readable:
            for message in link.receive():
                self._execute(message, link)
                if self._link is not link:
                    return
        if self._inspection in readable:
            self._inspection.serve(link)
        link.check()
        self._report_stopped(link)
        if self._running is None:
            return
        if notices := self._running.notices():
            self._reporter.show(notices)
        self._update_status()
        self._running.continue_ending()
        if not self._ranks.running:
            self._conclude(link)

    def _update_status(self) -> None:
        # Once for all machines: their output often ends up in one place.
        has_rank_zero = self._ranks.attempt is not None and self._ranks.attempt.first_rank == 0
        if self._status is not None and has_rank_zero:
            self._status.update(time.monotonic())

    def _describe_job(self) -> str:
        """Return the line about the whole job. Called in a thread."""
        link = self._link
        return "" if link is None else line_of(self._inspection.steps(link, every_seconds=PROGRESS_SECONDS))

    def _report_to(self, link: AgentLink, news: Failure | int) -> None:
        if self._ranks.attempt is None:
            return
        number = self._ranks.attempt.attempt
        if isinstance(news, Failure):
            link.send(RankFailed(attempt=number, failure=news))
        else:
            link.send(RankDeparted(attempt=number, rank=news))

    def _report_stopped(self, link: AgentLink) -> None:
        attempt = self._ranks.attempt
        if attempt is None or attempt.world_size == 1:
            return
        can_restart = self._options.max_restarts > 0
        for failed, pid in self._ranks.find_stopped(time.monotonic(), may_end=can_restart):
            if can_restart:
                self._report_to(link, failed)
            else:
                self._reporter.show(
                    f"[rankwise] rank {failed.rank} has been stopped (SIGSTOP); to resume it: kill -CONT {pid}\n"
                )

    # -- what the coordinator sends ----------------------------------------------------------------

    def _execute(self, message: Message, link: AgentLink) -> None:
        match message:
            case ShowText() if self._hosts_job:
                # Once for all machines: their output often ends up in one place.
                self._reporter.show(message.text)
            case ReportFailure():
                self._report_failure(message.failed)
            case Refuse():
                raise error_of(message)
            case Wait():
                self._rejoin_later(link)
            case EndJob():
                self._end_job(message)
            case InspectRequest() | InspectAnswer():
                self._inspection.handle(message, link)
            case _:
                self._execute_on_ranks(message)

    def _execute_on_ranks(self, message: Message) -> None:
        match message:
            case StartAttempt():
                self._start(message)
            case StopAttempt() if running := self._current(message.attempt):
                running.begin_to_end(message.settle_seconds)
            case StopRank() if running := self._current(message.attempt):
                running.begin_to_end_rank(message.rank, message.settle_seconds)
            case RanksDeparted() if running := self._current(message.attempt):
                running.note_departed([rank for first, last in message.runs for rank in range(first, last + 1)])
            case RequestStop():
                self._request_save()
            case _:  # a heartbeat, or for an attempt that is over
                pass

    def _current(self, number: int) -> _RunningAttempt | None:
        """Return the attempt of this number if its ranks may still run."""
        is_current = self._ranks.attempt is not None and self._ranks.attempt.attempt == number
        return self._running if is_current else None

    def _start(self, attempt: StartAttempt) -> None:
        self._running = _RunningAttempt(self._ranks)
        if attempt.num_nodes > 1:
            self._reporter.show(_ranks_here(attempt, self._ranks.num_ranks))
        self._ranks.start(attempt, between=self._raise_if_interrupted)

    def _request_save(self) -> None:
        """Ask the only rank of the job to save and exit: alone it follows no event log."""
        for rank in sorted(self._ranks.running):
            self._ranks.send_signal(rank, signal.SIGUSR2)

    def _report_failure(self, failed: FailedAttempt) -> None:
        advises = not self._options.controller  # which has a script for one device
        text = failure_report.whole(failed, advises=advises) if self._hosts_job else failure_report.one_line(failed)
        if self._options.served_elsewhere:
            text = ""  # shown where the job is served
        self._reporter.report(failed, text)

    def _rejoin_later(self, link: AgentLink) -> None:
        """Introduce this machine again a little later: a machine that has exited may still hold its place."""
        link.close()
        if select.select([self._signals.fileno()], [], [], AGAIN_SECONDS)[0]:
            self._handle_signal(self._signals.next_received())
        self._link = self._open_link(RETURN_SECONDS, self._raise_if_interrupted)

    def _end_job(self, message: EndJob) -> None:
        self._exit_code = message.exit_code
        if message.what:
            error = LaunchError(message.what, evidence=message.evidence or None, do=message.advice or None)
            self._reporter.show(f"[rankwise] {error}\n")

    def _conclude(self, link: AgentLink) -> None:
        """Report how the ranks of this attempt exited, once nothing they started is left."""
        if self._ranks.attempt is None:
            return
        self._running = None
        self._ranks.clear()
        link.send(RanksEnded(attempt=self._ranks.attempt.attempt, report=self._ranks.report()))

    # -- signals, and a lost coordinator -----------------------------------------------------------

    def _handle_signal(self, number: signal.Signals) -> None:
        is_ending = self._running is not None and self._running.is_ending
        if self._options.controller and 0 in self._ranks.running and not is_ending:
            # The job ends when the script does, as long as it may take to clean up.
            self._ranks.send_signal(0, number)
            return
        asks = number == signal.SIGUSR2 or (number == signal.SIGTERM and self._saves_on_terminate)
        if not asks or self._running is None or self._link is None:
            raise Interrupted(number)
        self._saves_on_terminate = False
        self._reporter.show(f"[rankwise] {number.name}: the ranks save at their next step and exit\n")
        self._link.send(RequestStop(reason=number.name))
        if number == signal.SIGTERM and self._passes_terminate_on:
            for rank in sorted(self._ranks.running):
                self._ranks.send_signal(rank, number)

    def _end_at_once(self, number: signal.Signals) -> int:
        """Terminate the ranks; kill them after a while, or at a second signal."""
        self._ranks.signal_all(number)
        deadline = time.monotonic() + STOP_SECONDS
        own = self._ranks.sources()
        while self._ranks.running and (left := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select([self._signals.fileno(), *own], [], [], left)
            if self._signals.fileno() in readable:
                self._signals.next_received()
                break
            self._ranks.receive(readable)
        self._ranks.clear()
        # Asked to save while there was nothing to save: the job may still be started again.
        exit_code = STOPPED_EXIT_CODE if number == signal.SIGUSR2 else 128 + number
        if self._link is not None:
            leave = NodeLeaves(signal=number.name, exit_code=exit_code, ends_job=self._hosts_job)
            with contextlib.suppress(ControllerLost):
                self._link.send(leave)
        self._ranks.report()
        self._reporter.show(f"[rankwise] {number.name}: every rank has been terminated\n")
        return exit_code

    def _reconnect(self, lost: ControllerLost) -> AgentLink | None:
        """Terminate the ranks here and reconnect to the coordinator; return ``None`` if that is pointless or fails."""
        self._ranks.clear()
        self._running = None
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._hosts_job or not self._options.can_restart:
            self._reporter.show(
                f"[rankwise] lost the rendezvous: {lost}; every rank here has been terminated. "
                "Start the job again; with --max-restarts 3 it survives this\n"
            )
            return None
        self._reporter.show(f"[rankwise] lost the rendezvous: {lost}; trying to reconnect for {RETURN_SECONDS:.0f} s\n")
        try:
            return self._open_link(RETURN_SECONDS, self._raise_if_interrupted)
        except LaunchError as error:
            self._reporter.show(f"[rankwise] {error}\n")
            return None


def _ranks_here(attempt: StartAttempt, num_ranks: int) -> str:
    ranks = fold_ranks(range(attempt.first_rank, attempt.first_rank + num_ranks))
    nodes = f"node {attempt.node_rank} of {attempt.num_nodes}"
    if 0 < len(attempt.hostnames) <= MOST_NAMED_NODES:
        nodes += f" ({', '.join(attempt.hostnames)})"
    return f"[rankwise] {ranks} of {attempt.world_size} here, {nodes}\n"
