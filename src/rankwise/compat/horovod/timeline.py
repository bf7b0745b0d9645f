# SPDX-License-Identifier: Apache-2.0
"""Horovod's timeline: started by a variable or by the script, one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.compat.horovod.negotiation.queue import current_queue
from rankwise.insight.timeline import Timeline

if TYPE_CHECKING:
    from rankwise.comm.session import Session


class _Timelines:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._under_way: Timeline | None = None
        self._number = 0
        session.on_leave(self.stop)

    def start(self, path: Path) -> None:
        if self._under_way is None:
            self._number += 1
            self._under_way = Timeline(self._session, path, self._number, current_queue().seat.hostnames)

    def stop(self) -> None:
        if self._under_way is not None:
            timeline, self._under_way = self._under_way, None
            timeline.stop()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:  # noqa: FBT001, FBT002 - Horovod's arguments
    """Record every step and collective of all ranks, until :func:`stop_timeline` or the end of the world.

    Called by: every rank. Does nothing if a timeline has been started already.

    Args:
        file_path: what rank 0 writes at the end: trace events, for ui.perfetto.dev and chrome://tracing.
        mark_cycles: ignored: there is no background thread with cycles.

    Raises:
        ConfigurationError: :func:`init` has not been called, the file cannot be written, or steps are not measured.

    Source: rankwise.insight.timeline.
    """
    del mark_cycles
    current_queue().session.once(_Timelines).start(Path(file_path))


def stop_timeline() -> None:
    """Write the timeline, if one has been started; rank 0 waits for the parts of the other ranks.

    Called by: every rank.

    Raises:
        ConfigurationError: :func:`init` has not been called.
    """
    current_queue().session.once(_Timelines).stop()
