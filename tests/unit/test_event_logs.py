# SPDX-License-Identifier: Apache-2.0
"""What the launcher tells ranks of their world's others, in whichever world they are."""

from __future__ import annotations

import json
from typing import Any

from rankwise.health.event_log import EXPENDABLE_KEY, WORLDS_KEY, key_of
from rankwise.launch.controller.attempt_keys import AttemptKeys
from rankwise.store.keys import Keys

WORLDS = ["attempt/2/", "attempt/2/join/1/", "attempt/2/join/2/"]
"""What the keys of each begin with."""


class _Job:
    """The keys of a job whose ranks are in their third attempt."""

    def __init__(self) -> None:
        self.keys = Keys()
        self.logs = AttemptKeys(self.keys, 2)

    def set(self, key: str, value: str) -> None:
        self.keys.compare_set(key, self.keys.peek(key) or b"", value.encode())

    def kinds(self, world: int) -> list[str]:
        events: list[dict[str, Any]] = []
        while (text := self.keys.peek(WORLDS[world] + key_of(len(events) + 1))) is not None:
            events.append(json.loads(text))
        return [event["kind"] for event in events]


def test_every_world_receives_each_event_once() -> None:
    job = _Job()
    job.logs.post({"kind": "left", "rank": 3})
    assert [job.kinds(world) for world in range(3)] == [["left"], [], []]
    # A rank writes there too, before the launcher has looked.
    job.set(WORLDS[0] + WORLDS_KEY, "1")
    job.set(WORLDS[1] + key_of(1), json.dumps({"kind": "own"}))
    job.logs.follow()
    job.logs.follow()
    assert job.kinds(1) == ["own", "left"]
    job.set(WORLDS[0] + WORLDS_KEY, "2")
    job.logs.post({"kind": "failed", "rank": 1})
    assert [job.kinds(world) for world in range(3)] == [
        ["left", "failed"],
        ["own", "left", "failed"],
        ["left", "failed"],
    ]


def test_two_events_alike_are_two() -> None:
    job = _Job()
    for _ in range(2):
        job.logs.post({"kind": "stop_requested", "rank": None, "reason": "SIGUSR2"})
    assert job.kinds(0) == ["stop_requested", "stop_requested"]


def test_optional_ranks_are_declared_again_in_each_world() -> None:
    job = _Job()
    assert job.logs.optional_ranks() == []
    job.set(WORLDS[0] + EXPENDABLE_KEY, "[1, 2]")
    assert job.logs.optional_ranks() == [1, 2]
    job.set(WORLDS[0] + WORLDS_KEY, "1")
    assert job.logs.optional_ranks() == []
    job.set(WORLDS[1] + EXPENDABLE_KEY, "[2]")
    assert job.logs.optional_ranks() == [2]
