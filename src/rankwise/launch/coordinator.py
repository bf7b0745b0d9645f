# SPDX-License-Identifier: Apache-2.0
"""Decides, for all machines of a job: when an attempt starts, on which of them, when it stops, how the job ends.

Values in, messages out: no socket, no clock, no thread. Times are seconds of one monotonic clock. Imported by
``serving``, which carries the messages.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, Any

from rankwise.launch import alone, failure
from rankwise.launch.attempt import Attempt, failed_event
from rankwise.launch.failure import FailedAttempt, Failure
from rankwise.launch.nodes import Member, Node, place, ranks_in_words, refusal_of, who_is_missing
from rankwise.stopping import STOPPED_EXIT_CODE

if TYPE_CHECKING:
    from collections.abc import Collection

Message = dict[str, Any]

LOST_SECONDS = 10.0
"""After how long without a word a machine counts as lost. A cut of a few seconds simply resumes."""
RETURN_SECONDS = 30.0
"""How long a job that cannot go on without a lost machine waits for it."""
LAST_CALL_SECONDS = 30.0
"""How long a job that has machines enough waits for more of them at its start."""
PEERS_SECONDS = 5.0
"""How long the other ranks have to end by themselves after a failure, where no restart follows."""
CAUSE_SECONDS = 0.5
"""How long the cause of a failure that is only an echo is waited for, where a restart follows."""
STOOD_STILL_SECONDS = 2.0
"""More than that between two ticks, and this machine has not been running."""
GROW_SECONDS = 30.0
"""How long ranks have to save and stop, where machines have come back."""


class Phase(Enum):
    """What the job is doing."""

    GATHERING = "waiting for machines"
    RUNNING = "running"
    STOPPING = "stopping"
    OVER = "over"


class Coordinator:
    """The job's state. Each method takes in one thing that happened; ``take`` gives out what follows from it."""

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
        self._max_restarts = max_restarts
        self._restarts_used = 0
        self._run_id = run_id
        self._members: dict[str, Member] = {}
        self._attempt: Attempt | None = None
        self._num_attempts = 0
        self._num_arrivals = 0
        self._deadline = now + timeout_seconds
        self._last_call: float | None = None
        self._asked_to_stop = False
        self._why_incomplete = ""
        self._ticked = now
        self._messages: list[tuple[str, Message]] = []
        self._events: list[tuple[int, Message]] = []

    @property
    def _is_one_rank(self) -> bool:
        return self._attempt is not None and self._attempt.world_size == 1

    def take(self) -> tuple[list[tuple[str, Message]], list[tuple[int, Message]]]:
        """Return what is to be sent, as (machine, message), and (attempt, event) for the attempt's event log."""
        taken = self._messages, self._events
        self._messages, self._events = [], []
        return taken

    # -- what happens ------------------------------------------------------------------------------

    def come(self, node: Node, now: float) -> None:
        """A machine's launcher has introduced itself."""
        if node.node_id in self._members:
            self.go(node.node_id, now, "came anew")
        refusal = self._refusal(node, now)
        if refusal is not None:
            self._messages.append((node.node_id, refusal))
            return
        self._members[node.node_id] = Member(node, heard=now, order=self._num_arrivals)
        self._num_arrivals += 1
        if self.max_nodes > 1:
            place = f"{len(self._members)} of {self._how_many()}"
            self._say(f"[rankwise] {node.hostname} has come with {ranks_in_words(node.num_ranks)} ({place})\n")
        if self.phase is Phase.RUNNING and self._attempt is not None:
            self._attempt.is_to_grow = True
            self._attempt.grow_deadline = now + GROW_SECONDS
            self._say("[rankwise] the ranks save at their next step and start anew with it\n")
            self._have_saved(f"{node.hostname} has come")
        self.tick(now)

    @property
    def attempt(self) -> int | None:
        """Number of the attempt that is on, or was the last."""
        return None if self._attempt is None else self._attempt.number

    def may_lose(self, attempt: int, ranks: Collection[int]) -> None:
        """Ranks have declared that the job goes on without some of them."""
        if self._attempt is not None and self._attempt.number == attempt:
            self._attempt.expendable = frozenset(ranks)

    def hear(self, node_id: str, now: float) -> None:
        """A machine has given a sign of life."""
        if node_id in self._members:
            self._members[node_id].heard = now

    def go(self, node_id: str, now: float, why: str) -> None:
        """A machine is gone: it said so, its connection has ended, or it has been silent too long."""
        member = self._members.pop(node_id, None)
        if member is None or self.phase is Phase.OVER:
            return
        self._say(f"[rankwise] {member.node.hostname} {why}\n")
        if self.phase in {Phase.RUNNING, Phase.STOPPING} and member.is_running and self._attempt is not None:
            still_there = self._attempt.running(member.ranks)
            is_borne = self.phase is Phase.RUNNING and self._attempt.bears(still_there)
            for rank in still_there if is_borne else member.ranks:
                # Whatever else failed first of itself is to blame, not the loss.
                lost = failure.from_lost_node(rank, member.node.hostname, math.inf)
                self._attempt.failures.setdefault(rank, lost)
                self._attempt.lost_ranks.add(rank)
                self._events.append((self._attempt.number, failed_event(lost, member.node.hostname)))
            if is_borne:
                self._say(self._attempt.bear(still_there))
            else:
                self._stop(0.0 if self._goes_on_without() or self._restarts_left() else PEERS_SECONDS)
            self._conclude_if_ended(now)
        elif self._attempt is not None and all(other.is_running for other in self._members.values()):
            self._attempt.grow_deadline = None
        if not self._members:
            self.phase = Phase.OVER

    def fail(self, node_id: str, attempt: int, failed: Failure) -> None:
        """A rank has failed; its machine tells the ranks itself."""
        current = self._attempt
        if self.phase is not Phase.RUNNING or current is None or current.number != attempt:
            return
        member = self._members.get(node_id)
        if member is None:
            return
        current.failures.setdefault(failed.rank, failed)
        current.arrivals.setdefault(failed.rank, len(current.arrivals))
        current.hostnames[failed.rank] = member.node.hostname
        is_borne = failed.rank in current.borne or current.bears({failed.rank})
        if is_borne or not failed.secondary:
            self._events.append((attempt, failed_event(failed, member.node.hostname)))
        if is_borne:
            self._say(current.bear({failed.rank}))
            settle_seconds = 0.0 if failed.type == "stopped" else PEERS_SECONDS
            end = {"do": "end_rank", "attempt": attempt, "rank": failed.rank, "settle_seconds": settle_seconds}
            self._messages.append((node_id, end))
        elif not self._restarts_left():
            self._stop(PEERS_SECONDS)
        else:
            self._stop(CAUSE_SECONDS if failed.secondary else 0.0)

    def depart(self, attempt: int, rank: int) -> None:
        """A rank has ended well while others run."""
        if self._attempt is not None and self._attempt.number == attempt:
            self._attempt.departed.add(rank)
            self._events.append((attempt, {"kind": "left", "rank": rank, "exit_code": 0, "last": None}))
            ended = {"do": "departed", "attempt": attempt, "ranks": sorted(self._attempt.departed)}
            self._messages += [(node_id, ended) for node_id, member in self._members.items() if member.is_running]

    def leave(self, node_id: str, signal_name: str, exit_code: int, now: float, *, ends_job: bool) -> None:
        """A machine's launcher was told by a signal to end, and has ended its ranks."""
        member = self._members.get(node_id)
        if member is None:
            return
        if ends_job or len(self._members) - 1 < self.min_nodes:
            what = f"{member.node.hostname} was told to end ({signal_name}), and the job with it."
            del self._members[node_id]
            self._over(exit_code, what)
        else:
            self.go(node_id, now, f"was told to end ({signal_name})")

    def ask_to_stop(self, reason: str) -> None:
        """Somebody wants the ranks to save and end at their next step."""
        if self.phase is Phase.OVER:
            return
        is_first, self._asked_to_stop = not self._asked_to_stop, True
        if self.phase is Phase.GATHERING:
            self._over(STOPPED_EXIT_CODE)
        elif self.phase is Phase.RUNNING and (is_first or self._is_one_rank):
            self._have_saved(reason)

    def end(self, node_id: str, attempt: int, report: Message, now: float) -> None:
        """All ranks of a machine have ended, by themselves or because they were told to."""
        current, member = self._attempt, self._members.get(node_id)
        if current is None or member is None or current.number != attempt or not member.is_running:
            return
        member.is_running = False
        for told in report["failures"]:
            failed = Failure(**told)
            current.failures[failed.rank] = failed
            current.hostnames[failed.rank] = member.node.hostname
        current.ends |= {int(rank): how for rank, how in report["ends"].items()}
        current.tails |= {int(rank): tail for rank, tail in report["tails"].items()}
        current.logs |= {int(rank): path for rank, path in report["logs"].items()}
        current.has_stopped = current.has_stopped or report["has_stopped"]
        current.is_alone = current.is_alone or report["is_alone"]
        self._conclude_if_ended(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        # Time in which this machine itself stood still (Ctrl-Z, a debugger) is nobody's silence.
        stood_still = now - self._ticked if now - self._ticked > STOOD_STILL_SECONDS else 0.0
        self._ticked = now
        for node_id, member in list(self._members.items()):
            member.heard += stood_still
            if now - member.heard > LOST_SECONDS and not member.node.serves:
                self._messages.append((node_id, {"do": "drop"}))
                self.go(node_id, now, f"is lost: no word from it for {now - member.heard:.0f} s")
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
                self._say(f"[rankwise] waiting {LAST_CALL_SECONDS:.0f} s for more nodes\n")
        is_time = not is_first or (self._last_call is not None and now >= self._last_call)
        if num_nodes == self.max_nodes or (num_nodes >= self.min_nodes and is_time):
            self._start()
        elif num_nodes < self.min_nodes and now > self._deadline:
            self._give_up()

    def _start(self) -> None:
        members = sorted(self._members.values(), key=place)
        world_size = sum(member.node.num_ranks for member in members)
        self._attempt = Attempt(number=self._num_attempts, world_size=world_size)
        self._num_attempts += 1
        self.phase = Phase.RUNNING
        first_rank = 0
        hostnames = [member.node.hostname for member in members]
        ranks_per_node = [member.node.num_ranks for member in members]
        for node_rank, member in enumerate(members):
            member.ranks = range(first_rank, first_rank + member.node.num_ranks)
            member.is_running = True
            member.order = node_rank
            first_rank += member.node.num_ranks
            start = {
                "do": "start",
                "run_id": self._run_id,
                "attempt": self._attempt.number,
                "node_rank": node_rank,
                "num_nodes": len(members),
                "ranks_per_node": ranks_per_node,
                "first_rank": member.ranks.start,
                "world_size": world_size,
                "hostnames": hostnames,
            }
            self._messages.append((member.node.node_id, start))
        self._num_arrivals = len(members)

    def _give_up(self) -> None:
        which, here = who_is_missing(list(self._members.values()), self.min_nodes)
        waited = RETURN_SECONDS if self._num_attempts else self._timeout_seconds
        come = "came back" if self._num_attempts else "came"
        self._over(
            1,
            f"{which} never {come}: waited {waited:.0f} s at {self._rendezvous}.",
            evidence=f"here: {here}" + (f"\n{self._why_incomplete}" if self._why_incomplete else ""),
            do=f"start it there too: rankwise run --rendezvous {self._rendezvous} ...; or ask there: rankwise doctor",
        )

    def _refusal(self, node: Node, now: float) -> Message | None:
        if self.phase is Phase.OVER:
            over = {"what": "The job is over.", "evidence": "", "advice": "start it anew on every machine"}
            return {"do": "refuse", **over}
        if self.phase is Phase.RUNNING and self._attempt and self._attempt.borne and self.min_nodes == self.max_nodes:
            # The others go on without it; only a restart takes it in.
            return {"do": "wait"}
        return refusal_of(node, list(self._members.values()), self.max_nodes, now)

    # -- stopping ----------------------------------------------------------------------------------

    def _stop(self, settle_seconds: float) -> None:
        """Have all ranks ended; they may end by themselves for a while."""
        if self._attempt is None:
            return
        self.phase = Phase.STOPPING
        for node_id, member in self._members.items():
            if member.is_running:
                stop = {"do": "stop", "attempt": self._attempt.number, "settle_seconds": settle_seconds}
                self._messages.append((node_id, stop))

    def _have_saved(self, reason: str) -> None:
        """Ask the ranks to save and end at their next step."""
        if self._attempt is None:
            return
        if not self._is_one_rank:
            self._events.append((self._attempt.number, {"kind": "stop", "rank": None, "reason": reason}))
            return
        # One rank alone follows no event log.
        save = {"do": "save", "attempt": self._attempt.number}
        self._messages += [(node_id, save) for node_id, member in self._members.items() if member.is_running]

    def _conclude_if_ended(self, now: float) -> None:
        current = self._attempt
        is_anyone_running = any(member.is_running for member in self._members.values())
        if current is None or is_anyone_running or self.phase is Phase.OVER:
            return
        self._say(alone.reminder(current.world_size) if current.is_alone else "")
        if current.failures.keys() - current.borne:
            self._conclude_failure(current, now)
        elif self._grows(current):
            self._restart("starting anew with the nodes that have come", now)
        else:
            self._say(current.reminder())
            self._over(STOPPED_EXIT_CODE if current.has_stopped else 0)

    def _grows(self, current: Attempt) -> bool:
        """Return whether the attempt ended for machines that have come, and not by itself."""
        was_ended = current.has_stopped or self.phase is Phase.STOPPING
        return current.is_to_grow and was_ended and not self._asked_to_stop

    def _conclude_failure(self, current: Attempt, now: float) -> None:
        failed = current.failed()
        spared = current.lost_ranks | current.borne
        causes = [one for one in failed.failures if not one.secondary and one.rank not in spared]
        if not causes and current.lost_ranks and self._goes_on_without():
            self._restart("going on without the lost node", now)
            return
        self._report(failed)
        if not self._restarts_left():
            self._over(failure.shell_code(failed.first.exit_code) or 1)
            return
        self._restarts_used += 1
        self._why_incomplete = f"rank {failed.first.rank}: {failed.first.type}"
        self._restart(f"restart {self._restarts_used} of {self._max_restarts}", now)

    def _restart(self, how: str, now: float) -> None:
        if self._asked_to_stop:
            self._over(STOPPED_EXIT_CODE)
            return
        self._say(f"[rankwise] {how}\n")
        self.phase = Phase.GATHERING
        self._deadline = now + RETURN_SECONDS
        if len(self._members) < self.min_nodes:
            self._say(f"[rankwise] waiting up to {RETURN_SECONDS:.0f} s for nodes to come back\n")
        self._gather(now)

    def _goes_on_without(self) -> bool:
        return self.min_nodes < self.max_nodes and len(self._members) >= self.min_nodes

    def _restarts_left(self) -> bool:
        return self._restarts_used < self._max_restarts

    def _over(self, exit_code: int, what: str = "", *, evidence: str = "", do: str = "") -> None:
        self.phase = Phase.OVER
        end = {"do": "end", "exit_code": exit_code, "what": what, "evidence": evidence, "advice": do}
        self._messages += [(node_id, end) for node_id in self._members]

    def _report(self, failed: FailedAttempt) -> None:
        told = failure.to_dict(failed)
        self._messages += [(node_id, {"do": "report", "failed": told}) for node_id in self._members]

    def _say(self, text: str) -> None:
        if text:
            self._messages += [(node_id, {"do": "say", "text": text}) for node_id in self._members]

    def _how_many(self) -> str:
        if self.min_nodes == self.max_nodes:
            return f"{self.max_nodes} nodes"
        return f"{self.min_nodes} to {self.max_nodes} nodes"
