# SPDX-License-Identifier: Apache-2.0
"""Each rank holds a connection to the next: the kernel closes it when a process exits, however that happens.

NCCL does not notice a peer that has exited, nor does a launcher that is not rankwise's report it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.comm.point_to_point.queues import LEFT
from rankwise.health import diagnosis, status_poll
from rankwise.health.event_log import ProcessEnded, post
from rankwise.health.failure_detector import EXPLANATION_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.comm.point_to_point.endpoint import Endpoint
    from rankwise.errors import RankwiseError


def watch_ring(endpoint: Endpoint) -> Callable[[], RankwiseError | None]:
    """Connect to the next rank; return a function that returns the error of the one before if it has exited.

    Called by: every rank. The function reports a rank that has exited to all others, unless its launcher does.
    """
    rank, world_size = endpoint.world.rank, endpoint.world.world_size
    detector = endpoint.detector
    before = (rank - 1) % world_size
    endpoint.open_way((rank + 1) % world_size)

    def broken() -> RankwiseError | None:
        if endpoint.is_closed or endpoint.recv_queue.ended.get(before, LEFT) == LEFT:
            return None
        with detector.changed:
            detector.changed.wait_for(
                lambda: detector.error is not None or detector.departed(before), EXPLANATION_SECONDS
            )
        process = status_poll.process_of(detector.store, before)
        if detector.error is not None or detector.departed(before) or process is None:
            return detector.error
        if not diagnosis.unanswered(detector.poll_status(), [before]):
            # It has not exited: only this connection broke, and it is not needed for anything else.
            endpoint.recv_queue.ended[before] = LEFT
            return None
        event = ProcessEnded(before, "A collective", process.pid)
        post(detector.store, event, detector.next_event)
        return diagnosis.peer_ended(detector.world, event)

    return broken
