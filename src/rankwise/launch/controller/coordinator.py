# SPDX-License-Identifier: Apache-2.0
"""Decides, for all machines of a job: when an attempt starts, on which of them, when it stops, how the job ends.

Values in, messages out: no socket, no clock, no thread. Times are seconds of one monotonic clock. Imported by
``server``, which carries the messages.
"""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from rankwise.errors import runs_of
from rankwise.health.event_log import Event, Left, StopRequested
from rankwise.health.preemption import STOPPED_EXIT_CODE
from rankwise.launch.controller.nodes import (
    Attempt,
    JobNode,
    failed_event,
    missing_nodes,
    node_order,
    ranks_in_words,
    refusal_of,
)
from rankwise.launch.messages import (
    EndJob,
    Message,
    Node,
    RanksDeparted,
    Refuse,
    ReportFailure,
    RequestStop,
    ShowText,
    StartAttempt,
    StopAttempt,
    StopRank,
    Wait,
)
from rankwise.launch.report import failure
from rankwise.launch.report.exit_code import shell_code
from rankwise.launch.report.ranks_alone import alone_reminder
from rankwise.world.environments.reading import format_counts

if TYPE_CHECKING:
    from collections.abc import Collection

    from rankwise.launch.messages import RankEnds
    from rankwise.launch.report.failure import FailedAttempt, Failure

LOST_SECONDS = 10.0
"""After how long without a heartbeat a machine is declared lost. A network cut of a few seconds is survived."""
RETURN_SECONDS = 30.0
"""How long a job that cannot continue without a lost machine waits for it."""
STARTING_SECONDS = 120.0
"""How long a launcher that has started may take to take part: it imports torch, perhaps from a slow disk."""
LAST_CALL_SECONDS = 30.0
"""How long a job that has enough machines waits for more at its start."""
PEERS_SECONDS = 4.0
"""How long the other ranks may take to exit by themselves after a failure, if no restart follows."""
CAUSE_SECONDS = 0.5
"""How long to wait for the cause of a failure that is only an echo, if a restart follows."""
STOOD_STILL_SECONDS = 2.0
"""With more than that between two ticks, this machine itself was suspended."""
WATCHER = ""
"""In place of a machine: receives what all machines are shown, for the process that serves the job and runs no rank."""
MOST_IN_FULL = 64
"""How many ranks a report names in full to machines that show only a line of it."""
DEPARTED_SECONDS = 5.0
"""How long more machines than that wait to be told of ranks that have exited: together, they are a few numbers."""
GROW_SECONDS = 30.0
"""How long ranks may take to save and stop for machines that have rejoined."""


class Phase(Enum):
    """The phase of the job."""

    GATHERING = "waiting for machines"
    RUNNING = "running"
    STOPPING = "stopping"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection of a machine; nothing is sent."""


class Coordinator:
    """The job's state. Each method handles one event; ``take_output`` returns the resulting messages.

    Its many fields are that state as one value: an event may change any of them, and nothing else decides.
    """

    def __init__(
        self,
        *,
        nodes: tuple[int, int],
        max_restarts: int,
        rendezvous: str,
        timeout_seconds: float,
        now: float,
        run_id: str,
        is_watched: bool = False,
    ) -> None:
        """``is_watched``: another process replaces lost machines, which may take as long as they had at the start."""
        self.phase = Phase.GATHERING
        self.min_nodes, self.max_nodes = nodes
        self._rendezvous = rendezvous
        self._max_restarts = max_restarts
        self._num_restarts = 0
        """After failures; those for machines that have joined or are lost do not count."""
        self._run_id = run_id
        self._is_watched = is_watched
        self._return_seconds = timeout_seconds if is_watched else RETURN_SECONDS
        self._members: dict[str, JobNode] = {}
        self._attempt: Attempt | None = None
        self._num_attempts = 0
        self._num_arrivals = 0
        self._gathering_since = now
        self._deadline = now + timeout_seconds
        self._starting_until = -math.inf
        """Until when a machine that has announced itself is waited for."""
        self._announced: set[str] = set()
        """Hostnames that have announced themselves while machines are waited for."""
        self._last_call: float | None = None
        self._departed: list[int] = []
        """Ranks that have exited without an error, which the machines are not told yet."""
        self._departed_since = now
        """When the first of them exited."""
        self._stop_requested = False
        self._why_incomplete = ""
        self._ticked = now
        self._messages: list[tuple[str, Message | Disconnect]] = []
        self._events: list[tuple[int, Event]] = []

    def take_output(self) -> tuple[list[tuple[str, Message | Disconnect]], list[tuple[int, Event]]]:
        """Return what to send, as (machine, message), and (attempt, event) for the attempt's event log."""
        taken = self._messages, self._events
        self._messages, self._events = [], []
        return taken

    # -- what happens ------------------------------------------------------------------------------

    def node_joined(self, node: Node, now: float) -> None:
        """A machine's launcher has introduced itself."""
        if node.node_id in self._members:
            self.node_lost(node.node_id, now, "rejoined")
        refusal = self._refusal(node, now)
        if refusal is not None:
            self._messages.append((node.node_id, refusal))
            return
        self._members[node.node_id] = JobNode(node, last_seen=now, order=self._num_arrivals)
        self._num_arrivals += 1
        if self.max_nodes > 1:
            most = self.max_nodes if self.min_nodes == self.max_nodes else f"{self.min_nodes} to {self.max_nodes}"
            place = f"{len(self._members)} of {most} nodes"
            self._show(f"[rankwise] {node.hostname} joined with {ranks_in_words(node.num_ranks)} ({place})\n")
        if self.phase is Phase.RUNNING and self._attempt is not None:
            self._attempt.grow(now + GROW_SECONDS)
            self._show("[rankwise] the ranks save at their next step and restart with it\n")
            self._request_save(f"{node.hostname} joined")
        if self.phase is Phase.GATHERING:
            self._gather(now)

    def node_starting(self, hostname: str, now: float) -> None:
        """A machine's launcher has started, and joins later."""
        if self.phase is Phase.GATHERING:
            # One that crashes again and again does not extend the wait each time.
            if hostname in self._announced:
                return
            self._announced.add(hostname)
        self._starting_until = now + STARTING_SECONDS
        if self.phase is Phase.GATHERING and self._attempt is not None:
            self._show(f"[rankwise] {hostname} has started and is getting ready\n")

    @property
    def attempt(self) -> int | None:
        """Number of the current or last attempt."""
        return None if self._attempt is None else self._attempt.number

    @property
    def world_size(self) -> int:
        """Number of ranks of the current or last attempt."""
        return 0 if self._attempt is None else self._attempt.world_size

    def set_optional_ranks(self, attempt: int, ranks: Collection[int]) -> None:
        """Ranks have declared that the job continues without some of them."""
        if self._attempt is not None and self._attempt.number == attempt:
            self._attempt.declare_optional(ranks)

    def heartbeat(self, node_id: str, now: float) -> None:
        """A machine has sent a heartbeat."""
        if node_id in self._members:
            self._members[node_id].note_heartbeat(now)

    def node_lost(self, node_id: str, now: float, why: str) -> None:
        """A machine is lost: it left, its connection was closed, or it has been silent too long."""
        member = self._members.pop(node_id, None)
        if member is None or self.phase is Phase.OVER:
            return
        self._show(f"[rankwise] {member.node.hostname} {why}\n")
        if self.phase in {Phase.RUNNING, Phase.STOPPING} and member.is_running and self._attempt is not None:
            still_there = self._attempt.running(member.ranks)
            is_tolerated = self.phase is Phase.RUNNING and self._attempt.tolerates(still_there)
            for rank in still_there if is_tolerated else member.ranks:
                # A rank that failed first by itself is the cause, not the loss.
                lost = failure.from_lost_node(rank, member.node.hostname, math.inf)
                self._attempt.failures.setdefault(rank, lost)
                self._attempt.lost_ranks.add(rank)
                self._events.append((self._attempt.number, failed_event(lost, member.node.hostname)))
            if is_tolerated:
                self._show(self._attempt.tolerate(still_there))
            else:
                self._stop(0.0 if self._can_continue_without() or self._may_restart else PEERS_SECONDS)
            self._conclude_if_ended(now)
        elif self._attempt is not None and all(other.is_running for other in self._members.values()):
            self._attempt.end_growing()
        if not self._members and not self._is_watched:
            self.phase = Phase.OVER

    def rank_failed(self, node_id: str, attempt: int, failed: Failure) -> None:
        """A rank has failed; its machine notifies the ranks itself."""
        current = self._attempt
        if self.phase is not Phase.RUNNING or current is None or current.number != attempt:
            return
        member = self._members.get(node_id)
        if member is None:
            return
        current.note_failure(failed, member.node.hostname)
        is_tolerated = failed.rank in current.tolerated or current.tolerates({failed.rank})
        if is_tolerated or not failed.secondary:
            self._events.append((attempt, failed_event(failed, member.node.hostname)))
        if is_tolerated:
            self._show(current.tolerate({failed.rank}))
            settle_seconds = 0.0 if failed.type == "stopped" else PEERS_SECONDS
            stop = StopRank(attempt=attempt, rank=failed.rank, settle_seconds=settle_seconds)
            self._messages.append((node_id, stop))
        elif not self._may_restart:
            self._stop(PEERS_SECONDS)
        else:
            self._stop(CAUSE_SECONDS if failed.secondary else 0.0)

    def rank_departed(self, attempt: int, rank: int) -> None:
        """A rank has exited without an error while others run."""
        if self._attempt is not None and self._attempt.number == attempt:
            self._attempt.departed.add(rank)
            if not self._departed:
                self._departed_since = self._ticked
            self._departed.append(rank)
            self._events.append((attempt, Left(rank, 0)))

    def node_leaves(self, node_id: str, signal_name: str, code: int, now: float, *, ends_job: bool) -> None:
        """A machine's launcher received a signal, and has terminated its ranks."""
        member = self._members.get(node_id)
        if member is None:
            return
        if ends_job or len(self._members) - 1 < self.min_nodes:
            what = f"{member.node.hostname} received {signal_name}, which ends the job."
            del self._members[node_id]
            self._over(code, what)
        else:
            self.node_lost(node_id, now, f"received {signal_name} and left")

    def request_stop(self, reason: str) -> None:
        """The ranks are asked to save and exit at their next step."""
        if self.phase is Phase.OVER:
            return
        is_first, self._stop_requested = not self._stop_requested, True
        if self.phase is Phase.GATHERING:
            self._over(STOPPED_EXIT_CODE)
        elif self._attempt is not None and self.phase is Phase.RUNNING and (is_first or self._attempt.world_size == 1):
            self._request_save(reason)

    def ranks_ended(self, node_id: str, attempt: int, report: RankEnds, now: float) -> None:
        """All ranks of a machine have exited, by themselves or on request."""
        current, member = self._attempt, self._members.get(node_id)
        if current is None or member is None or current.number != attempt or not member.is_running:
            return
        member.end()
        current.end_ranks(report, member.node.hostname)
        self._conclude_if_ended(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        # Time in which this machine itself was suspended (Ctrl-Z, a debugger) does not count as silence.
        stood_still = now - self._ticked if now - self._ticked > STOOD_STILL_SECONDS else 0.0
        self._ticked = now
        for node_id, member in list(self._members.items()):
            member.note_heartbeat(member.last_seen + stood_still)
            if now - member.last_seen > LOST_SECONDS and not member.node.serves:
                self._messages.append((node_id, Disconnect()))
                self.node_lost(node_id, now, f"was declared lost: no heartbeat for {now - member.last_seen:.0f} s")
        if self.phase is Phase.GATHERING:
            self._gather(now)
        self._send_departed(now)
        deadline = None if self._attempt is None else self._attempt.grow_deadline
        if self.phase is Phase.RUNNING and deadline is not None and now > deadline:
            self._stop(0.0)

    def _send_departed(self, now: float) -> None:
        """Notify the machines of the ranks that have exited since the last time: once for all of them."""
        wait = DEPARTED_SECONDS if len(self._members) > MOST_IN_FULL else 0.0
        if self._departed and self._attempt is not None and now - self._departed_since >= wait:
            self._send_running(RanksDeparted(attempt=self._attempt.number, runs=tuple(runs_of(self._departed))))
            self._departed.clear()

    # -- gathering ---------------------------------------------------------------------------------

    def _gather(self, now: float) -> None:
        num_nodes = len(self._members)
        is_first = self._num_attempts == 0
        if num_nodes >= self.min_nodes and is_first and self._last_call is None:
            self._last_call = now + LAST_CALL_SECONDS
            if num_nodes < self.max_nodes:
                self._show(f"[rankwise] waiting {LAST_CALL_SECONDS:.0f} s for more nodes\n")
        is_time = not is_first or (self._last_call is not None and now >= self._last_call)
        if num_nodes == self.max_nodes or (num_nodes >= self.min_nodes and is_time):
            self._start()
        elif num_nodes < self.min_nodes and now > max(self._deadline, self._starting_until):
            self._give_up()

    def _start(self) -> None:
        members = sorted(self._members.values(), key=node_order)
        world_size = sum(member.node.num_ranks for member in members)
        self._attempt = Attempt(number=self._num_attempts, world_size=world_size)
        self._departed.clear()
        self._num_attempts += 1
        self.phase = Phase.RUNNING
        self._announced.clear()
        self._starting_until = -math.inf
        first_rank = 0
        hostnames = tuple(member.node.hostname for member in members)
        ranks_per_node = format_counts(member.node.num_ranks for member in members)
        for node_rank, member in enumerate(members):
            member.start(range(first_rank, first_rank + member.node.num_ranks), node_rank)
            first_rank += member.node.num_ranks
            start = StartAttempt(
                run_id=self._run_id,
                attempt=self._attempt.number,
                node_rank=node_rank,
                num_nodes=len(members),
                ranks_per_node=ranks_per_node,
                first_rank=member.ranks.start,
                world_size=world_size,
                hostnames=hostnames if len(members) <= MOST_IN_FULL or member.node.serves else (),
            )
            self._messages.append((member.node.node_id, start))
        self._num_arrivals = len(members)

    def _give_up(self) -> None:
        which, here = missing_nodes(list(self._members.values()), self.min_nodes)
        waited = max(self._deadline, self._starting_until) - self._gathering_since
        node_joined = "rejoined" if self._num_attempts else "joined"
        self._over(
            1,
            f"{which} never {node_joined}: waited {waited:.0f} s at {self._rendezvous}.",
            evidence=f"here: {here}" + (f"\n{self._why_incomplete}" if self._why_incomplete else ""),
            do="see why with `ray status`"
            if self._is_watched
            else f"start it there too: rankwise run --rendezvous {self._rendezvous} ...; or check with rankwise doctor",
        )

    def _refusal(self, node: Node, now: float) -> Refuse | Wait | None:
        if self.phase is Phase.OVER:
            return Refuse(what="The job is over.", evidence="", advice="start it again on every machine")
        if (
            self.phase is Phase.RUNNING
            and self._attempt
            and self._attempt.tolerated
            and self.min_nodes == self.max_nodes
        ):
            # The others continue without it; it can join only at a restart.
            return Wait()
        return refusal_of(node, list(self._members.values()), self.max_nodes, now)

    # -- stopping ----------------------------------------------------------------------------------

    def _stop(self, settle_seconds: float) -> None:
        """Have all ranks terminated; they may exit by themselves for a while."""
        if self._attempt is None:
            return
        self.phase = Phase.STOPPING
        self._send_running(StopAttempt(attempt=self._attempt.number, settle_seconds=settle_seconds))

    def _request_save(self, reason: str) -> None:
        """Ask the ranks to save and exit at their next step."""
        if self._attempt is None:
            return
        if self._attempt.world_size == 1:
            # It follows no event log.
            self._send_running(RequestStop(reason=reason))
        else:
            self._events.append((self._attempt.number, StopRequested(reason)))

    def _conclude_if_ended(self, now: float) -> None:
        """Restart the ranks or end the job, once no rank of the attempt runs."""
        current = self._attempt
        is_anyone_running = any(member.is_running for member in self._members.values())
        if current is None or is_anyone_running or self.phase is Phase.OVER:
            return
        self._show(alone_reminder(current.world_size) if current.is_alone else "")
        failed = current.failed() if current.failures.keys() - current.tolerated else None
        restart_reason = ""
        if failed is None:
            code = STOPPED_EXIT_CODE if current.has_stopped else 0
            if current.growing and (current.has_stopped or self.phase is Phase.STOPPING):
                restart_reason = "restarting with the nodes that have joined"
        elif current.is_lost_with_node() and self._can_continue_without():
            code, restart_reason = STOPPED_EXIT_CODE, "continuing without the lost node"
        else:
            self._report(failed)
            self._why_incomplete = f"rank {failed.first.rank}: {failed.first.type}"
            code = shell_code(failed.first.exit_code) or 1
            if self._stop_requested and failed.first.exit_code == -signal.SIGTERM:
                # A rank of an evicted pod that could not save yet.
                code = STOPPED_EXIT_CODE
            if self._may_restart:
                self._num_restarts += 1
                code, restart_reason = STOPPED_EXIT_CODE, f"restart {self._num_restarts} of {self._max_restarts}"
        if restart_reason and not self._stop_requested:
            self._restart(restart_reason, now)
            return
        if failed is None:
            self._show(current.reminder())
        self._over(code)

    def _restart(self, reason: str, now: float) -> None:
        self._show(f"[rankwise] {reason}\n")
        self.phase = Phase.GATHERING
        self._gathering_since = now
        self._deadline = now + self._return_seconds
        if len(self._members) < self.min_nodes:
            self._show(f"[rankwise] waiting up to {self._return_seconds:.0f} s for nodes to rejoin\n")
        self._gather(now)

    @property
    def _may_restart(self) -> bool:
        return self._num_restarts < self._max_restarts

    def _can_continue_without(self) -> bool:
        return self.min_nodes < self.max_nodes and len(self._members) >= self.min_nodes

    def _over(self, code: int, what: str = "", *, evidence: str = "", do: str = "") -> None:
        self.phase = Phase.OVER
        self._send_all(EndJob(exit_code=code, what=what, evidence=evidence, advice=do))

    def _show(self, text: str) -> None:
        """Have the process that serves the job show a text."""
        if text:
            serving = [node_id for node_id, member in self._members.items() if member.node.serves]
            showing = [WATCHER] if self._is_watched else serving or self._members
            self._messages += [(node_id, ShowText(text=text)) for node_id in showing]

    def _report(self, failed: FailedAttempt) -> None:
        """Have every machine report how an attempt failed; only the one that serves the job shows more than a line."""
        brief = failed
        if len(failed.failures) + len(failed.ends) > MOST_IN_FULL:
            brief = replace(failed, failures=failed.failures[:1], ends={})
        if self._is_watched:
            self._messages.append((WATCHER, ReportFailure(failed=failed)))
        for node_id, member in self._members.items():
            self._messages.append((node_id, ReportFailure(failed=failed if member.node.serves else brief)))

    def _send_all(self, message: Message) -> None:
        watchers = [WATCHER] if self._is_watched else []
        self._messages += [(node_id, message) for node_id in (*watchers, *self._members)]

    def _send_running(self, message: Message) -> None:
        self._messages += [(node_id, message) for node_id, member in self._members.items() if member.is_running]
