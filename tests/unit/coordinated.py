# SPDX-License-Identifier: Apache-2.0
"""A coordinator and what it sends, for the tests of its rules."""

from __future__ import annotations

from typing import Any

from rankwise.launch.controller.coordinator import Coordinator
from rankwise.launch.messages import Message, Node, RankEnds, ReportFailure, ShowText, StartAttempt
from rankwise.launch.report import failure

TIMEOUT_SECONDS = 100.0


class Scene:
    """A coordinator and its machines."""

    def __init__(self, nodes: tuple[int, int], max_restarts: int = 0, *, is_watched: bool = False) -> None:
        self.now = 0.0
        self.coordinator = Coordinator(
            nodes=nodes,
            max_restarts=max_restarts,
            rendezvous="host0:29400",
            timeout_seconds=TIMEOUT_SECONDS,
            now=0.0,
            run_id="run",
            is_watched=is_watched,
        )

    def node_joined(self, name: str, ranks: int = 2, node_rank: int | None = None, **job: str) -> list[tuple[str, Any]]:
        node = Node(node_id=name, hostname=name, num_ranks=ranks, node_rank=node_rank, job=job)
        self.coordinator.node_joined(node, self.now)
        return self.sent()

    def sent(self, kind: type[Message] | None = None) -> list[tuple[str, Any]]:
        """Return what was sent since the last look, but for text, or one kind of it."""
        self.messages, self.events = self.coordinator.take_output()
        return [
            (to, one)
            for to, one in self.messages
            if (not isinstance(one, ShowText) if kind is None else isinstance(one, kind))
        ]

    def starts(self) -> dict[str, tuple[int, int, int]]:
        """Return attempt, first rank and world size that each machine received."""
        return {to: (one.attempt, one.first_rank, one.world_size) for to, one in self.sent(StartAttempt)}

    def rank_failed(self, name: str, attempt: int, error: BaseException, rank: int) -> list[tuple[str, Any]]:
        self.coordinator.rank_failed(name, attempt, failure.from_exception(error, rank, 1))
        return self.sent()

    def ranks_ended(self, name: str, attempt: int, *failures: failure.Failure, has_stopped: bool = False) -> None:
        report = RankEnds(failures=failures, has_stopped=has_stopped)
        self.coordinator.ranks_ended(name, attempt, report, self.now)

    def heartbeat_all_but(self, *silent: str, seconds: float) -> None:
        """Let time pass in which all machines but some send heartbeats."""
        for _ in range(int(seconds) + 1):
            self.now += seconds / (int(seconds) + 1)
            for name in ("a", "b", "c"):
                if name not in silent:
                    self.coordinator.heartbeat(name, self.now)
            self.coordinator.tick(self.now)


def failed(error: BaseException, rank: int) -> failure.Failure:
    return failure.from_exception(error, rank, 1)


def report_of(messages: list[tuple[str, Any]]) -> failure.FailedAttempt:
    return next(one.failed for _, one in messages if isinstance(one, ReportFailure))


def text_to(name: str, scene: Scene) -> str:
    return "".join(one.text for to, one in scene.messages if to == name and isinstance(one, ShowText))
