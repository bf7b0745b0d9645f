# SPDX-License-Identifier: Apache-2.0
"""One attempt to run a job: which of its ranks have failed or ended, and which failures the others tolerate.

Values only. Imported by the coordinator, which decides what follows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rankwise.errors import fold_ranks
from rankwise.launch.report.failure import FailedAttempt, Failure, causes_first

if TYPE_CHECKING:
    from collections.abc import Collection

    from rankwise.launch.messages import RankEnds


@dataclass(slots=True)
class Attempt:
    """One attempt, from its start to its end."""

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
    is_to_grow: bool = False
    """Whether its ranks were asked to save and exit for a machine that has joined."""
    grow_deadline: float | None = None
    """When they are terminated for it if they do not save; ``None`` if it has left again."""
    order_received: dict[int, int] = field(default_factory=dict[int, int])
    """The order in which failures of ranks were reported: clocks of machines differ."""

    def grow_by(self, deadline: float) -> None:
        """Record that the ranks were asked to save and exit for a machine that has joined."""
        self.is_to_grow = True
        self.grow_deadline = deadline

    def cancel_growth(self) -> None:
        """Record that the machine has left again."""
        self.grow_deadline = None

    def continue_without(self, ranks: Collection[int]) -> None:
        """Record that ranks have been declared optional."""
        self.optional = frozenset(ranks)

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
