# SPDX-License-Identifier: Apache-2.0
"""The machines of a job, as the coordinator knows them: how one introduces itself, and when it is not let in.

Values only. Imported by the coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

SUSPICIOUS_SECONDS = 2.5
"""After how long without a word a machine may be gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One machine's launcher, as it introduces itself."""

    node_id: str
    """Different for each launcher process."""
    hostname: str
    num_ranks: int
    node_rank: int | None = None
    """The number it was given, where it was given one."""
    serves: bool = False
    """Whether it serves the others; it then is the first, where no numbers were given."""
    job: dict[str, str] = field(default_factory=dict[str, str])
    """What must be the same on all machines: the script, the versions."""


def introduced(told: dict[str, Any]) -> Node:
    """Return the machine that a launcher tells of; one of another version may tell more, and is then refused by it."""
    return Node(**{one.name: told[one.name] for one in fields(Node) if one.name in told})


@dataclass(slots=True)
class Member:
    """A machine that takes part, and where it stands in the current attempt."""

    node: Node
    heard: float
    order: int
    ranks: range = range(0)
    is_running: bool = False
    """Whether its ranks of the current attempt may still be there."""


def refusal_of(node: Node, members: Sequence[Member], max_nodes: int, now: float) -> dict[str, Any] | None:
    """Return the answer to a machine that cannot take part beside those that do, or ``None`` where it can.

    It is told to wait where one in its way may be gone: a machine that starts anew comes before its end is noticed.
    """
    for member in members:
        if node.node_rank is not None and member.node.node_rank == node.node_rank:
            if now - member.heard > SUSPICIOUS_SECONDS:
                return {"do": "wait"}
            return {
                "do": "refuse",
                "what": f"Two machines are node {node.node_rank}: {member.node.hostname} and {node.hostname}.",
                "evidence": f"{member.node.hostname} was heard {now - member.heard:.1f} s ago",
                "advice": "give each machine its own --node-rank, or none of them",
            }
        differing = {
            name: (member.node.job[name], value)
            for name, value in node.job.items()
            if member.node.job.get(name, value) != value
        }
        if differing:
            return {
                "do": "refuse",
                "what": f"{node.hostname} and {member.node.hostname} would not run the same job.",
                "evidence": "\n".join(
                    f"{name}: {member.node.hostname} has {theirs}, {node.hostname} has {ours}"
                    for name, (theirs, ours) in sorted(differing.items())
                ),
                "advice": "bring the same script and versions to every machine, and give each the same command",
            }
    if len(members) >= max_nodes:
        if any(now - member.heard > SUSPICIOUS_SECONDS for member in members):
            return {"do": "wait"}
        return {
            "do": "refuse",
            "what": f"The job has all its {max_nodes} nodes.",
            "evidence": "here: " + ", ".join(member.node.hostname for member in members),
            "advice": "raise --nodes on every machine, or give the other job another port",
        }
    return None


def who_is_missing(members: Sequence[Member], min_nodes: int) -> tuple[str, str]:
    """Return in words which machines have not come, and which have."""
    here = ", ".join(member.node.hostname for member in sorted(members, key=place)) or "none"
    given = {member.node.node_rank for member in members}
    numbers = [number for number in range(min_nodes) if number not in given]
    absent = min_nodes - len(members)
    if None not in given and len(numbers) == absent:
        return f"node {', '.join(map(str, numbers))}", here
    return f"{absent} of {min_nodes} nodes", here


def place(member: Member) -> tuple[int, int]:
    """Return where a machine stands among the others: by its given number, else where it stood, or as it came."""
    given = member.node.node_rank
    order = -1 if member.node.serves else member.order
    return (order if given is None else given, order)


def ranks_in_words(number: int) -> str:
    """Return ``2 ranks`` for 2."""
    return "1 rank" if number == 1 else f"{number} ranks"
