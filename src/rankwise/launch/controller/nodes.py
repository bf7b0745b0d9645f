# SPDX-License-Identifier: Apache-2.0
"""The machines of a job, as the coordinator knows them: which may join, their order, and the state of one attempt.

Values only. Imported by the coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rankwise.errors import fold_ranks
from rankwise.health.event_log import Failed
from rankwise.launch.messages import Node, RankEnds, Refuse, Wait
from rankwise.launch.report.failure import FailedAttempt, Failure, causes_first

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

SUSPICIOUS_SECONDS = 2.5
"""After how long without a heartbeat a machine may be lost."""


@dataclass(slots=True)
class JobNode:
    """A machine that takes part, and its state in the current attempt."""

    node: Node
    last_seen: float
    order: int
    ranks: range = range(0)
    is_running: bool = False
    """Whether its ranks of the current attempt may still be running."""

    def start(self, ranks: range, order: int) -> None:
        """Record that the machine starts these ranks, and its number in the attempt."""
        self.ranks = ranks
        self.order = order
        self.is_running = True

    def end(self) -> None:
        """Record that all its ranks have exited."""
        self.is_running = False

    def note_heartbeat(self, now: float) -> None:
        """Record a heartbeat of the machine."""
        self.last_seen = now


def refusal_of(node: Node, members: Sequence[JobNode], max_nodes: int, now: float) -> Refuse | Wait | None:
    """Return the answer to a machine that cannot take part, or ``None`` if it can.

    It is told to wait if a conflicting machine may be lost: one that restarts may rejoin before its end is noticed.
    """
    for member in members:
        if node.node_rank is not None and member.node.node_rank == node.node_rank:
            if now - member.last_seen > SUSPICIOUS_SECONDS:
                return Wait()
            return Refuse(
                what=f"Two machines are node {node.node_rank}: {member.node.hostname} and {node.hostname}.",
                evidence=f"last heartbeat of {member.node.hostname}: {now - member.last_seen:.1f} s ago",
                advice="give each machine its own --node-rank, or none of them",
            )
        if member.node.job == node.job:
            continue
        differing = {
            name: (member.node.job[name], value)
            for name, value in node.job.items()
            if member.node.job.get(name, value) != value
        }
        if differing:
            return Refuse(
                what=f"{node.hostname} and {member.node.hostname} do not run the same job.",
                evidence="\n".join(
                    f"{name}: {member.node.hostname} has {theirs}, {node.hostname} has {ours}"
                    for name, (theirs, ours) in sorted(differing.items())
                ),
                advice="install the same script and versions on every machine, and run the same command on each",
            )
    if len(members) >= max_nodes:
        if any(now - member.last_seen > SUSPICIOUS_SECONDS for member in members):
            return Wait()
        return Refuse(
            what=f"The job already has all its {max_nodes} nodes.",
            evidence="here: " + ", ".join(member.node.hostname for member in members),
            advice="raise --nodes on every machine, or use another port for the other job",
        )
    return None


def missing_nodes(members: Sequence[JobNode], min_nodes: int) -> tuple[str, str]:
    """Return a description of the missing machines, and of those that have joined."""
    here = ", ".join(member.node.hostname for member in sorted(members, key=node_order)) or "none"
    given = {member.node.node_rank for member in members}
    numbers = [number for number in range(min_nodes) if number not in given]
    absent = min_nodes - len(members)
    if None not in given and len(numbers) == absent:
        return f"node {', '.join(map(str, numbers))}", here
    return f"{absent} of {min_nodes} nodes", here


def node_order(member: JobNode) -> tuple[int, int]:
    """Return the sort key of a machine: its given number, else its previous position, else the order of joining."""
    given = member.node.node_rank
    order = -1 if member.node.serves else member.order
    return (order if given is None else given, order)


def ranks_in_words(number: int) -> str:
    """Return ``2 ranks`` for 2."""
    return "1 rank" if number == 1 else f"{number} ranks"


# -- one attempt on them -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Attempt:
    """One attempt, from its start to its end.

    Its many fields are what the machines have reported of each rank, by rank: the report of a failure needs all of it.
    """

    number: int
    world_size: int
    failures: dict[int, Failure] = field(default_factory=dict[int, Failure])
    ends: dict[int, str] = field(default_factory=dict[int, str])
    hostnames: dict[int, str] = field(default_factory=dict[int, str])
    stderr_tails: dict[int, tuple[str, ...]] = field(default_factory=dict[int, "tuple[str, ...]"])
    log_paths: dict[int, str] = field(default_factory=dict[int, str])
    lost_ranks: set[int] = field(default_factory=set[int])
    departed: set[int] = field(default_factory=set[int])
    """Ranks that have exited without an error while others ran."""
    optional: frozenset[int] = frozenset()
    """Ranks that have been declared optional: the job continues without them."""
    tolerated: set[int] = field(default_factory=set[int])
    """Those of them whose failure did not end the others."""
    has_stopped: bool = False
    """Whether a rank saved and stopped, as requested."""
    is_alone: bool = False
    """Whether rank 0 took an optimizer step without having joined its peers."""
    growing: bool = False
    """Whether its ranks were asked to save and exit for a machine that has joined."""
    grow_deadline: float | None = None
    """When they are terminated for it if they do not save; ``None`` if it has left again."""
    order_received: dict[int, int] = field(default_factory=dict[int, int])
    """The order in which failures of ranks were reported: clocks of machines differ."""

    def grow(self, deadline: float) -> None:
        """Record that its ranks were asked to save and exit for a machine that has joined, until ``deadline``."""
        self.growing, self.grow_deadline = True, deadline

    def end_growing(self) -> None:
        """Record that the machine has left again: its ranks are not terminated for it."""
        self.grow_deadline = None

    def declare_optional(self, ranks: Collection[int]) -> None:
        """Record the ranks without which the job continues."""
        self.optional = frozenset(ranks)

    def note_failure(self, failed: Failure, hostname: str) -> None:
        """Record that a rank has failed, in the order of the reports; what is known of it already stays."""
        self.failures.setdefault(failed.rank, failed)
        self.order_received.setdefault(failed.rank, len(self.order_received))
        self.hostnames[failed.rank] = hostname

    def end_ranks(self, report: RankEnds, hostname: str) -> None:
        """Record how the ranks of a machine have exited."""
        for failed in report.failures:
            self.failures[failed.rank] = failed
            self.hostnames[failed.rank] = hostname
        self.ends |= report.ends
        self.stderr_tails |= report.stderr_tails
        self.log_paths |= report.log_paths
        self.has_stopped = self.has_stopped or report.has_stopped
        self.is_alone = self.is_alone or report.is_alone

    def running(self, ranks: Collection[int]) -> set[int]:
        """Return those of ``ranks`` that have neither failed nor exited."""
        return set(ranks) - self.failures.keys() - self.departed

    def tolerates(self, ranks: Collection[int]) -> bool:
        """Return whether the others continue if ``ranks`` fail: another optional one must run, or have succeeded."""
        return self.optional.issuperset(ranks) and bool(self.optional - self.failures.keys() - set(ranks))

    def tolerate(self, ranks: Collection[int]) -> str:
        """Record that the others continue without ``ranks``, which have failed; return the text to show."""
        new = sorted(set(ranks) - self.tolerated)
        self.tolerated.update(new)
        lines: list[str] = []
        for how, alike in self._alike(new).items():
            without = "it" if len(alike) == 1 else "them"
            lines.append(f"[rankwise] {fold_ranks(alike)} failed ({how}); the others continue without {without}\n")
        tracebacks = [self.failures[rank].traceback.rstrip("\n") for rank in new]
        return "".join([*lines, *(f"{text}\n" for text in tracebacks if text)])

    def reminder(self) -> str:
        """Return the last line of a job that succeeded without some ranks; empty if none failed."""
        if not self.tolerated:
            return ""
        failed = [f"{fold_ranks(ranks)} failed earlier: {how}" for how, ranks in self._alike(self.tolerated).items()]
        others = "saved and stopped" if self.has_stopped else "succeeded"
        return f"[rankwise] {'; '.join(failed)}; the others {others}\n"

    def _alike(self, ranks: Collection[int]) -> dict[str, list[int]]:
        """Return short descriptions of failures, each with its ranks."""
        ranks_of: dict[str, list[int]] = {}
        for rank in sorted(ranks):
            ranks_of.setdefault(self.failures[rank].brief, []).append(rank)
        return ranks_of

    def is_lost_with_node(self) -> bool:
        """Return whether no rank failed by itself: all failures are ranks lost with their machine, or echoes."""
        spared = self.lost_ranks | self.tolerated
        return bool(self.lost_ranks) and all(one.secondary or one.rank in spared for one in self.failures.values())

    def failed(self) -> FailedAttempt:
        """Return how all ranks exited, after a failure that ended the others."""
        by_clock = causes_first(self.failures.values())
        last = len(self.order_received)
        # A tolerated failure is the cause of echoes only.
        failures = tuple(
            sorted(
                by_clock,
                key=lambda one: (one.secondary, one.rank in self.tolerated, self.order_received.get(one.rank, last)),
            )
        )
        first = failures[0].rank
        return FailedAttempt(
            attempt=self.number,
            world_size=self.world_size,
            failures=failures,
            tolerated=tuple(sorted(self.tolerated)),
            ends={rank: how for rank, how in self.ends.items() if rank not in self.failures},
            hostname=self.hostnames.get(first, ""),
            stderr_tail=self.stderr_tails.get(first, ()),
            log_path=self.log_paths.get(first),
        )


def failed_event(failed: Failure, hostname: str) -> Failed:
    """Return the event that notifies the other ranks of a failure."""
    text = failed.traceback or failed.how or failed.message or f"the process exited with code {failed.exit_code}"
    return Failed(failed.rank, failed.type, text, hostname)
