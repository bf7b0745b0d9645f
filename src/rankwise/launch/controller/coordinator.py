# SPDX-License-Identifier: Apache-2.0
"""Decides, for all machines of a job: when an attempt starts, on which of them, when it stops, how the job ends.

Values in, messages out: no socket, no clock, no thread. Times are seconds of one monotonic clock. The state of one
attempt is in ``attempt``; whether a restart follows is decided in ``restarts``. Imported by ``server``, which carries
the messages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from rankwise.health.preemption import STOPPED_EXIT_CODE
from rankwise.launch.controller.attempt import Attempt
from rankwise.launch.controller.nodes import JobNode, node_order, ranks_in_words, refusal_of, who_is_missing
from rankwise.launch.controller.restarts import AttemptEnd, Finish, RestartPolicy
from rankwise.launch.messages import (
    EndJob,
    Node,
    RankEnds,
    RanksDeparted,
    Refuse,
    ReportFailure,
    SaveAndStop,
    ShowText,
    StartAttempt,
    StopAttempt,
    StopRank,
    ToAgent,
    Wait,
)
from rankwise.launch.report import exit_code, failure, unjoined

if TYPE_CHECKING:
    from collections.abc import Collection

    from rankwise.launch.report.failure import FailedAttempt, Failure

Event = dict[str, Any]
"""As ``health.event_log`` posts it."""

LOST_SECONDS = 10.0
"""After how long without a heartbeat a machine is declared lost. A network cut of a few seconds is survived."""
RETURN_SECONDS = 30.0
"""How long a job that cannot continue without a lost machine waits for it."""
LAST_CALL_SECONDS = 30.0
"""How long a job that has enough machines waits for more at its start."""
PEERS_SECONDS = 5.0
"""How long the other ranks may take to exit by themselves after a failure, if no restart follows."""
CAUSE_SECONDS = 0.5
"""How long to wait for the cause of a failure that is only an echo, if a restart follows."""
STOOD_STILL_SECONDS = 2.0
"""With more than that between two ticks, this machine itself was suspended."""
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


def failed_event(failed: Failure, hostname: str) -> dict[str, Any]:
    """Return the event that notifies the other ranks of a failure."""
    text = failed.traceback or failed.message or f"the process exited with code {failed.exit_code}"
    return {"kind": "failed", "rank": failed.rank, "error_type": failed.type, "text": text, "hostname": hostname}


class Coordinator:
    """The job's state. Each method handles one event; ``take_output`` returns the resulting messages."""

    def __init__(
        self,
        *,
        nodes: tuple[int, int],
        max_restarts: int,
        rendezvous: str,
        timeout_seconds: float,
        now: float,
        run_id: str,
    ) -> None:
        self.phase = Phase.GATHERING
        self.min_nodes, self.max_nodes = nodes
        self._rendezvous = rendezvous
        self._timeout_seconds = timeout_seconds
        self._restarts = RestartPolicy(max_restarts)
        self._run_id = run_id
        self._members: dict[str, JobNode] = {}
        self._attempt: Attempt | None = None
        self._num_attempts = 0
        self._num_arrivals = 0
        self._deadline = now + timeout_seconds
        self._last_call: float | None = None
        self._stop_requested = False
        self._why_incomplete = ""
        self._ticked = now
        self._messages: list[tuple[str, ToAgent | Disconnect]] = []
        self._events: list[tuple[int, Event]] = []

    @property
    def _is_one_rank(self) -> bool:
        return self._attempt is not None and self._attempt.world_size == 1

    def take_output(self) -> tuple[list[tuple[str, ToAgent | Disconnect]], list[tuple[int, Event]]]:
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
            place = f"{len(self._members)} of {self._how_many()}"
            self._show(f"[rankwise] {node.hostname} joined with {ranks_in_words(node.num_ranks)} ({place})\n")
        if self.phase is Phase.RUNNING and self._attempt is not None:
            self._attempt.grow_by(now + GROW_SECONDS)
            self._show("[rankwise] the ranks save at their next step and restart with it\n")
            self._request_save(f"{node.hostname} joined")
        self.tick(now)

    @property
    def attempt(self) -> int | None:
        """Number of the current or last attempt."""
        return None if self._attempt is None else self._attempt.number

    def set_optional_ranks(self, attempt: int, ranks: Collection[int]) -> None:
        """Ranks have declared that the job continues without some of them."""
        if self._attempt is not None and self._attempt.number == attempt:
            self._attempt.continue_without(ranks)

    def heartbeat(self, node_id: str, now: float) -> None:
        """A machine has sent a heartbeat."""
        if node_id in self._members:
            self._members[node_id].see(now)

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
                self._stop(0.0 if self._can_continue_without() or self._restarts.has_left else PEERS_SECONDS)
            self._conclude_if_ended(now)
        elif self._attempt is not None and all(other.is_running for other in self._members.values()):
            self._attempt.cancel_growth()
        if not self._members:
            self.phase = Phase.OVER

    def rank_failed(self, node_id: str, attempt: int, failed: Failure) -> None:
        """A rank has failed; its machine notifies the ranks itself."""
        current = self._attempt
        if self.phase is not Phase.RUNNING or current is None or current.number != attempt:
            return
        member = self._members.get(node_id)
        if member is None:
            return
        current.failures.setdefault(failed.rank, failed)
        current.order_received.setdefault(failed.rank, len(current.order_received))
        current.hostnames[failed.rank] = member.node.hostname
        is_tolerated = failed.rank in current.tolerated or current.tolerates({failed.rank})
        if is_tolerated or not failed.secondary:
            self._events.append((attempt, failed_event(failed, member.node.hostname)))
        if is_tolerated:
            self._show(current.tolerate({failed.rank}))
            settle_seconds = 0.0 if failed.type == "stopped" else PEERS_SECONDS
            stop = StopRank(attempt=attempt, rank=failed.rank, settle_seconds=settle_seconds)
            self._messages.append((node_id, stop))
        elif not self._restarts.has_left:
            self._stop(PEERS_SECONDS)
        else:
            self._stop(CAUSE_SECONDS if failed.secondary else 0.0)

    def rank_departed(self, attempt: int, rank: int) -> None:
        """A rank has exited without an error while others run."""
        if self._attempt is not None and self._attempt.number == attempt:
            self._attempt.departed.add(rank)
            self._events.append((attempt, {"kind": "left", "rank": rank, "exit_code": 0, "last": None}))
            ended = RanksDeparted(attempt=attempt, ranks=tuple(sorted(self._attempt.departed)))
            self._messages += [(node_id, ended) for node_id, member in self._members.items() if member.is_running]

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
        elif self.phase is Phase.RUNNING and (is_first or self._is_one_rank):
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
            member.see(member.last_seen + stood_still)
            if now - member.last_seen > LOST_SECONDS and not member.node.serves:
                self._messages.append((node_id, Disconnect()))
                self.node_lost(node_id, now, f"was declared lost: no heartbeat for {now - member.last_seen:.0f} s")
        if self.phase is Phase.GATHERING:
            self._gather(now)
        deadline = None if self._attempt is None else self._attempt.grow_deadline
        if self.phase is Phase.RUNNING and deadline is not None and now > deadline:
            self._stop(0.0)

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
        elif num_nodes < self.min_nodes and now > self._deadline:
            self._give_up()

    def _start(self) -> None:
        members = sorted(self._members.values(), key=node_order)
        world_size = sum(member.node.num_ranks for member in members)
        self._attempt = Attempt(number=self._num_attempts, world_size=world_size)
        self._num_attempts += 1
        self.phase = Phase.RUNNING
        first_rank = 0
        hostnames = tuple(member.node.hostname for member in members)
        ranks_per_node = tuple(member.node.num_ranks for member in members)
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
                hostnames=hostnames,
            )
            self._messages.append((member.node.node_id, start))
        self._num_arrivals = len(members)

    def _give_up(self) -> None:
        which, here = who_is_missing(list(self._members.values()), self.min_nodes)
        waited = RETURN_SECONDS if self._num_attempts else self._timeout_seconds
        node_joined = "rejoined" if self._num_attempts else "joined"
        self._over(
            1,
            f"{which} never {node_joined}: waited {waited:.0f} s at {self._rendezvous}.",
            evidence=f"here: {here}" + (f"\n{self._why_incomplete}" if self._why_incomplete else ""),
            do=f"start it there too: rankwise run --rendezvous {self._rendezvous} ...; or check with rankwise doctor",
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
        for node_id, member in self._members.items():
            if member.is_running:
                stop = StopAttempt(attempt=self._attempt.number, settle_seconds=settle_seconds)
                self._messages.append((node_id, stop))

    def _request_save(self, reason: str) -> None:
        """Ask the ranks to save and exit at their next step."""
        if self._attempt is None:
            return
        if not self._is_one_rank:
            self._events.append((self._attempt.number, {"kind": "stop_requested", "rank": None, "reason": reason}))
            return
        # A single rank follows no event log.
        save = SaveAndStop(attempt=self._attempt.number)
        self._messages += [(node_id, save) for node_id, member in self._members.items() if member.is_running]

    def _conclude_if_ended(self, now: float) -> None:
        current = self._attempt
        is_anyone_running = any(member.is_running for member in self._members.values())
        if current is None or is_anyone_running or self.phase is Phase.OVER:
            return
        self._show(unjoined.reminder(current.world_size) if current.is_alone else "")
        failed = current.failed() if current.failures.keys() - current.tolerated else None
        decision = self._restarts.after(
            self._end_of(current, failed),
            can_continue_without=self._can_continue_without(),
            stop_requested=self._stop_requested,
        )
        if failed is None and isinstance(decision, Finish):
            self._show(current.reminder())
        if failed is not None and decision.reports_failure:
            self._messages += [(node_id, ReportFailure(failed=failed)) for node_id in self._members]
            self._why_incomplete = f"rank {failed.first.rank}: {failed.first.type}"
        if isinstance(decision, Finish):
            self._over(decision.exit_code)
        else:
            self._restart(decision.reason, now)

    def _end_of(self, current: Attempt, failed: FailedAttempt | None) -> AttemptEnd:
        """Return the facts that the decision about a restart depends on."""
        if failed is None:
            was_ended = current.has_stopped or self.phase is Phase.STOPPING
            is_to_grow = current.is_to_grow and was_ended and not self._stop_requested
            return AttemptEnd(has_failed=False, has_stopped=current.has_stopped, is_to_grow=is_to_grow)
        spared = current.lost_ranks | current.tolerated
        has_cause = any(not one.secondary and one.rank not in spared for one in failed.failures)
        return AttemptEnd(
            has_failed=True,
            is_lost_node=bool(current.lost_ranks) and not has_cause,
            exit_code=exit_code.shell_code(failed.first.exit_code),
        )

    def _restart(self, reason: str, now: float) -> None:
        self._show(f"[rankwise] {reason}\n")
        self.phase = Phase.GATHERING
        self._deadline = now + RETURN_SECONDS
        if len(self._members) < self.min_nodes:
            self._show(f"[rankwise] waiting up to {RETURN_SECONDS:.0f} s for nodes to rejoin\n")
        self._gather(now)

    def _can_continue_without(self) -> bool:
        return self.min_nodes < self.max_nodes and len(self._members) >= self.min_nodes

    def _over(self, code: int, what: str = "", *, evidence: str = "", do: str = "") -> None:
        self.phase = Phase.OVER
        end = EndJob(exit_code=code, what=what, evidence=evidence, advice=do)
        self._messages += [(node_id, end) for node_id in self._members]

    def _show(self, text: str) -> None:
        if text:
            self._messages += [(node_id, ShowText(text=text)) for node_id in self._members]

    def _how_many(self) -> str:
        if self.min_nodes == self.max_nodes:
            return f"{self.max_nodes} nodes"
        return f"{self.min_nodes} to {self.max_nodes} nodes"
