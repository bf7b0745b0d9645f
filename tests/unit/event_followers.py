# SPDX-License-Identifier: Apache-2.0
"""A rank that follows the job's event log, and the log itself."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rankwise.health import event_log
from rankwise.health.failure_detector import FailureDetector
from rankwise.store.opening import serve
from rankwise.world.facts import World

if TYPE_CHECKING:
    from collections.abc import Generator

    from rankwise.health.event_log import Event
    from rankwise.store.client import Store

ALL_READ_SECONDS = 20.0


@contextmanager
def following(*log: Event | list[int], world_size: int = 4) -> Generator[FailureDetector]:
    """Rank 0 of ``world_size``, which has read events; a list of ranks declares that they are optional."""
    store, _ = serve(secret=b"of this test")
    world = World(
        rank=0,
        world_size=world_size,
        local_rank=0,
        local_world_size=world_size,
        node_rank=0,
        num_nodes=1,
        device="cpu",
        backend="gloo",
        hostname="here",
        source="test",
    )
    detector = FailureDetector(store, world, timeout_seconds=30.0)
    try:
        for one in log:
            if isinstance(one, list):
                event_log.post_expendable(store, one)
            else:
                event_log.post(store, one)
        number = event_log.post(store, event_log.Expendable([]))
        with detector.changed:
            assert detector.changed.wait_for(lambda: detector.next_event > number, ALL_READ_SECONDS)
        yield detector
    finally:
        detector.leave(wait_for_peers=False)
        detector.store.close()
        store.close()


def log_of(store: Store) -> list[Event]:
    """Return the events of a log."""
    found: list[Event] = []
    while store.check(event_log.key_of(len(found) + 1)):
        found.append(event_log.event_of(store.get(event_log.key_of(len(found) + 1), 1.0)))
    return found
