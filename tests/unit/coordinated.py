# SPDX-License-Identifier: Apache-2.0
"""A coordinator and what it says, for the tests of its rules."""

from __future__ import annotations

from typing import Any

from rankwise.launch import failure
from rankwise.launch.coordinator import (
    Coordinator,
    Node,
)

TIMEOUT_SECONDS = 100.0


class Scene:
    """A coordinator, and the machines it talks to."""

    def __init__(self, nodes: tuple[int, int], max_restarts: int = 0) -> None:
        self.now = 0.0
        self.coordinator = Coordinator(
            nodes=nodes,
            max_restarts=max_restarts,
            rendezvous="host0:29400",
            timeout_seconds=TIMEOUT_SECONDS,
            now=0.0,
            run_id="run",
        )

    def come(self, name: str, ranks: int = 2, node_rank: int | None = None, **job: str) -> list[tuple[str, Any]]:
        node = Node(node_id=name, hostname=name, num_ranks=ranks, node_rank=node_rank, job=job)
        self.coordinator.come(node, self.now)
        return self.said()

    def said(self, do: str | None = None) -> list[tuple[str, Any]]:
        """Return what was sent since the last look, but for text, or one kind of it."""
        self.messages, self.events = self.coordinator.take()
        return [(to, one) for to, one in self.messages if (one["do"] == do if do else one["do"] != "say")]

    def starts(self) -> dict[str, tuple[int, int, int]]:
        """Return attempt, first rank and world size that each machine was told."""
        return {to: (one["attempt"], one["first_rank"], one["world_size"]) for to, one in self.said("start")}

    def fail(self, name: str, attempt: int, error: BaseException, rank: int) -> list[tuple[str, Any]]:
        self.coordinator.fail(name, attempt, failure.from_exception(error, rank, 1))
        return self.said()

    def end(self, name: str, attempt: int, *failures: failure.Failure, has_stopped: bool = False) -> None:
        report = {
            "failures": [failure.to_dict(one) for one in failures],
            "ends": {},
            "tails": {},
            "logs": {},
            "has_stopped": has_stopped,
            "is_alone": False,
        }
        self.coordinator.end(name, attempt, report, self.now)

    def hear_all_but(self, *silent: str, seconds: float) -> None:
        """Let time pass in which all machines but some are heard."""
        for _ in range(int(seconds) + 1):
            self.now += seconds / (int(seconds) + 1)
            for name in ("a", "b", "c"):
                if name not in silent:
                    self.coordinator.hear(name, self.now)
            self.coordinator.tick(self.now)


def failed(error: BaseException, rank: int) -> failure.Failure:
    return failure.from_exception(error, rank, 1)


def report_of(messages: list[tuple[str, Any]]) -> failure.FailedAttempt:
    return failure.from_dict(next(one["failed"] for _, one in messages if one["do"] == "report"))


def text_to(name: str, scene: Scene) -> str:
    return "".join(one["text"] for to, one in scene.messages if to == name and one["do"] == "say")
