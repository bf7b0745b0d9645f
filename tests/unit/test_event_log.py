# SPDX-License-Identifier: Apache-2.0
"""What the launcher tells ranks of their world's others, in whichever world they are."""

from __future__ import annotations

from rankwise.health.event_log import (
    EXPENDABLE_KEY,
    WORLDS_KEY,
    DetectorEnded,
    Event,
    Failed,
    Left,
    StopRequested,
    event_of,
    key_of,
    post,
)
from rankwise.launch.controller.server import AttemptKeys
from rankwise.store.keys import Keys

WORLDS = ["attempt/2/", "attempt/2/join/1/", "attempt/2/join/2/"]
"""What the keys of each begin with."""


class _Job:
    """The keys of a job whose ranks are in their third attempt."""

    def __init__(self) -> None:
        self.keys = Keys()
        self.logs = AttemptKeys(self.keys, 2, 4)

    def set(self, key: str, value: str) -> None:
        self.keys.compare_set(key, self.keys.peek(key) or b"", value.encode())

    def set_if_absent(self, key: str, value: str) -> bool:
        self.set(WORLDS[1] + key, value)
        return True

    def events(self, world: int) -> list[Event]:
        events: list[Event] = []
        while (text := self.keys.peek(WORLDS[world] + key_of(len(events) + 1))) is not None:
            events.append(event_of(text))
        return events


def test_every_world_receives_each_event_once() -> None:
    job = _Job()
    left, failed, own = Left(3), Failed(1, "ValueError", "boom"), DetectorEnded(2)
    job.logs.post(left)
    assert [job.events(world) for world in range(3)] == [[left], [], []]
    # A rank writes there too, before the launcher has looked.
    job.set(WORLDS[0] + WORLDS_KEY, "1")
    post(job, own)
    job.logs.follow()
    job.logs.follow()
    assert job.events(1) == [own, left]
    job.set(WORLDS[0] + WORLDS_KEY, "2")
    job.logs.post(failed)
    assert [job.events(world) for world in range(3)] == [[left, failed], [own, left, failed], [left, failed]]


def test_all_ranks_read_the_first_failures_and_those_of_optional_ranks() -> None:
    job = _Job()
    job.set(WORLDS[0] + EXPENDABLE_KEY, "[20, 21]")
    failures = [Failed(rank, "ValueError", "boom") for rank in range(22)]
    # It had left its world before.
    job.logs.post(Left(0))
    for failed in failures:
        job.logs.post(failed)
    # Of rank 0 they read that it failed too.
    assert job.events(0) == [Left(0), *failures[:9], *failures[20:]]


def test_two_events_alike_are_two() -> None:
    job = _Job()
    for _ in range(2):
        job.logs.post(StopRequested("SIGUSR2"))
    assert job.events(0) == 2 * [StopRequested("SIGUSR2")]


def test_optional_ranks_are_declared_again_in_each_world() -> None:
    job = _Job()
    assert job.logs.optional_ranks() == []
    job.set(WORLDS[0] + EXPENDABLE_KEY, "[1, 2]")
    assert job.logs.optional_ranks() == [1, 2]
    job.set(WORLDS[0] + WORLDS_KEY, "1")
    assert job.logs.optional_ranks() == []
    job.set(WORLDS[1] + EXPENDABLE_KEY, "[2]")
    assert job.logs.optional_ranks() == [2]
