# SPDX-License-Identifier: Apache-2.0
"""The machines of a job, as the coordinator knows them: which may join, and their order.

Values only. Imported by the coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.launch.messages import Node, Refuse, Wait

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    def see(self, now: float) -> None:
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


def who_is_missing(members: Sequence[JobNode], min_nodes: int) -> tuple[str, str]:
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
